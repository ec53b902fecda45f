import threading

from recsys.bench.parts.process_memory import AnonymousMemory


def test_memory_is_sampled_until_the_object_is_deleted():
    before = set(threading.enumerate())
    memory = AnonymousMemory()
    [thread] = set(threading.enumerate()) - before
    assert thread.is_alive()
    assert memory.peak >= memory.at_start > 0

    del memory

    thread.join(timeout=60)
    assert not thread.is_alive()

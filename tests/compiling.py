"""How processes that run tests side by side share the work of compiling kernels."""

from pathlib import Path

from filelock import FileLock
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.sigutils import normalize_signature


def compile_once():
    """Of processes that run tests side by side, one compiles a kernel; the others wait for it.

    Without the lock all of them would compile it, which takes longer.
    """
    compile_anew = Dispatcher.compile

    def compile_or_wait(dispatcher, signature):
        function, folder = dispatcher.py_func, dispatcher.stats.cache_path
        is_compiled = normalize_signature(signature)[0] in dispatcher.overloads
        if is_compiled or folder is None:
            return compile_anew(dispatcher, signature)
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock = Path(folder, f"{function.__module__}.{function.__qualname__}.lock")
        # The lock of threads comes first, as it does in numba: a kernel compiles those it calls.
        with global_compiler_lock, FileLock(lock, is_singleton=True):
            return compile_anew(dispatcher, signature)

    Dispatcher.compile = compile_or_wait

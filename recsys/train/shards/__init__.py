"""Checkpoints of a run on several processes: each process saves the rows that it has.

    folder     the folders of the processes, and the newest checkpoint that all of them have
    restore    restores them on any number of processes; also a checkpoint of one process on several

It needs neither TorchRec nor a process group.
"""

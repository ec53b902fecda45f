"""The processes that train a run: one, or several that `torchrun` starts.

processes    what differs between the two, and a run on one process
launched     finds out which it is
ranks        a run on several processes, and what it does not support
rank_model   its model, with the tables divided among the processes; needs TorchRec
"""

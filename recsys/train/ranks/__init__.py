"""The processes that train a run: one, or several that `torchrun` starts.

processes    what differs between the two, and a run on one process
launched     finds out which it is
ranks        a run on several processes
rank_model   its model, with the tables divided among the processes; needs TorchRec
rank_tables  the divided tables in the model, whose ids and rows may come ahead of their step
dense_gradients  how they average the gradients of the dense part
rules        what is not supported on several processes
"""

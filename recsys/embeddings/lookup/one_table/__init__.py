"""Lookups in single tables: what an `nn.EmbeddingBag` or `nn.Embedding` does in its forward.

bag_calls, device_calls   most lookups: one kernel each; their calls (`bag_call`) share autograd
                          nodes (`shared_nodes`)
bag_lookup                all others, by `fused_lookup`
"""

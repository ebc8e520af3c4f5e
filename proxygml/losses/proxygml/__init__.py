"""ProxyGML (Zhu et al., NeurIPS 2020). Start with definition.py: the paper's Eq. 2 to 12 as one plain function.

module.py is the loss that you train with. It runs a faster implementation with the same values and gradients: fused.py
for few proxies, chunked.py for many. sharded.py spreads classes over processes.
"""

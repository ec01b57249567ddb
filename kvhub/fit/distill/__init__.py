"""The distilled correction: gradient steps on a fitted map, folded into its matrices.

It starts from a closed-form fit, reads the same windows and gives the same tensors, so that a distilled
mapper is applied at the cost of the ridge it came from. What is minimised is KL(target on its own cache ||
target on the mapped cache) over the tokens that follow, backwards through the frozen target into the maps:
KV-Lingo (arXiv 2609.32610) does it to maps of one source layer.
"""

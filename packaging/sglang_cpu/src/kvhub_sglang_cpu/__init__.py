"""Development and CI only: SGLang 0.5.23 on a machine without a GPU.

`schemas` is called by `import torch`, `hicache` by SGLang; see README.md.
"""

"""Triton kernels beside the plain torch they replace.

Each idea is a pair of files: `norm.py` has the function that models call, the plain torch, and what autograd needs;
`norm_gpu.py` has the kernels, and is imported only where a tensor on a GPU is at hand (`choice.py`).

norm, swiglu, rope      operators between products          linear    products, and where their gradients go
loss                    the language head, in chunks        cast      matrices in 8 bits
adamw, halves           the update, master values           note      what one kernel tells the next
adamw8, lion, sgd, average (_gpu alone; the plain torch is in optim/)
weights_gpu             what kernels of updates share
blocks, fused           attention, a block of keys at a time
bits, sparse            what ReLU lets through              blockwise values in 8 bits, a scale for each block
places, pool            where a maximum was                 lying     how a dense tensor lies in memory
launch                  the same launch once more
"""

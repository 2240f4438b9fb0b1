"""Checkpoint layouts to canonical `RawWeights`, and what a layer's weights must look like.

One rank's share of a layer is read in five steps, which `loading` takes one after the other:

1. `checkpoint`: a `TensorSource` has names, shapes and dtypes, and reads slices when it is asked.
2. `names`: which stored matrices the experts have, as `Part`s; `storages` says of which tensors each consists.
3. `bands`: which rows and columns of a part this rank takes, and where they go (`PartShape`, `Band`); `spans` has the
   arithmetic of one axis.
4. `reads`: a `Read` for each stored tensor of each expert, and a list of all that is missing or misshapen. Nothing has
   been read or allocated until here.
5. `filling`: the canonical tensors, which `expected` describes. Each piece that is read becomes canonical values in
   `pieces` (by `codes` and `element_types`), and `content` refuses what would compute nonsense.

`canonical` and `requantize` are for tensors that are in memory already.
"""

"""Write a float checkpoint of an MoE model with its experts quantized, in the layout of a scheme's ecosystem."""

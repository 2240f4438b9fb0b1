"""Checkpoint layouts to canonical `RawWeights`, and what a layer's weights must look like."""

"""The Megatron-Core backend: dense and mixture-of-experts models, cut in five dimensions.

Megatron gives layers, schedules and communication; the model around the layers, its names, the
scores, the optimizer's arithmetic and the checkpoints are ours, and the torch backend's.
"""

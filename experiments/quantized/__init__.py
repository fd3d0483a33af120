"""The subcommands of `experiments.quantized_attention`, a module each."""

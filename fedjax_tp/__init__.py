"""FedTP in JAX: personalized federated learning with transformers.

Pure functions: data over clients (`data`), models, the server's `hypernetwork`,
`algorithms` on one contract, and the `simulation` that runs them. Nothing here writes a
file or prints; that is for `experiments`.
"""

from fedjax_tp import algorithms, data, hypernetwork, models, simulation, tree, types
from fedjax_tp.types import InputError

__all__ = [
    "InputError",
    "algorithms",
    "data",
    "hypernetwork",
    "models",
    "simulation",
    "tree",
    "types",
]

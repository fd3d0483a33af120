"""What the plan says of the process."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from experiments import results
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.plan import Plan


@pytest.mark.parametrize(("kept_on_host", "saved"), [(False, 1000), (True, 400)])
def test_a_process_has_devices_checkpoints_and_what_compiling_takes(
    kept_on_host, saved
):
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))
    plan = Plan(
        client_parameters=1,
        hypernetwork_parameters=0,
        bytes_down=4,
        bytes_up=4,
        state_bytes=1000,
        kept_bytes=600,
        fixed_bytes=5000,
        lane_bytes=70,
        server_bytes=10,
        lanes=3,
    )
    setup = SimpleNamespace(
        schedule=LocalSchedule(1, 1, 1, 3, mesh),
        kept_on_host=kept_on_host,
        train=jnp.zeros(250, jnp.float32),
    )
    found = results.process_bytes(setup, {"small": plan._replace(lanes=1), "a": plan})
    # On each of two devices: 5000, less the data that is there already, and 3 lanes.
    on_devices = 2 * (5000 - 1000 + 3 * 70)
    assert found == results._COMPILATION_BYTES + on_devices + 3 * saved

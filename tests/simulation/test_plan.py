"""Plans: what is sent and held, memory against the compiler's own figure."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from fedjax_tp import tree
from fedjax_tp.algorithms import REGISTRY, Setting
from fedjax_tp.models import task as tasks
from fedjax_tp.models.cnn import LeNet
from fedjax_tp.models.vit import ViT
from fedjax_tp.simulation.cohort import MESH_AXIS, LocalSchedule
from fedjax_tp.simulation.plan import Plan, fitting_lanes, make_plan
from fedjax_tp.simulation.rounds import init_state, make_advance, state_sharding
from tests.conftest import federate_sizes

KEY = jax.random.key(3)
SIZES = [5, 12, 1, 8, 3, 30]
SCHEDULE = LocalSchedule(4, 1, 30, 2)


def test_a_plan_counts_what_is_sent_and_held(small_task):
    data = federate_sizes(SIZES)
    params = tree.num_elements(small_task.init(KEY))
    attention = 64 * 3
    plans = {
        name: make_plan(
            REGISTRY[name](Setting(small_task, 6)), small_task, data, 2, SCHEDULE
        )
        for name in ("fedtp", "fedtp_vanilla", "fedavg", "local")
    }
    assert {plan.client_parameters for plan in plans.values()} == {params}
    down = {name: plan.bytes_down for name, plan in plans.items()}
    assert down == {
        "fedtp": 4 * params,
        "fedtp_vanilla": 4 * (params - attention),
        "fedavg": 4 * params,
        "local": 0,
    }
    assert {n: p.bytes_up for n, p in plans.items()} == down
    trunk = 128 * 128 + 128
    heads = 129 * attention
    assert plans["fedtp"].hypernetwork_parameters == trunk + heads + 6 * 128
    assert plans["local"].state_bytes >= 6 * 4 * params


VIT = tasks.classification(
    ViT(3, patch_size=2, dim=32, depth=2, heads=4, head_dim=32, mlp_dim=64), (8, 8, 1)
)
CNN = tasks.classification(LeNet(3), (8, 8, 1))


@pytest.mark.parametrize(
    ("task", "name", "lanes", "devices"),
    [
        (VIT, "fedtp", 1, 1),
        (VIT, "fedtp", 4, 1),
        (VIT, "fedtp_vanilla", 1, 2),
        (CNN, "local", 1, 1),
        (CNN, "fedavg", 4, 1),
    ],
    ids=["fedtp", "fedtp in lanes", "vanilla on a mesh", "cnn kept", "cnn in lanes"],
)
def test_the_memory_of_a_plan_is_the_compilers_within_a_quarter(
    task, name, lanes, devices
):
    data = federate_sizes([96] * 6)
    algorithm = REGISTRY[name](Setting(task, 6))
    mesh = Mesh(np.array(jax.devices()[:devices]), (MESH_AXIS,))
    schedule = LocalSchedule(64, 1, 96, lanes, mesh)
    plan = make_plan(algorithm, task, data, 4, schedule)
    state = jax.eval_shape(lambda key: init_state(algorithm, 6, key), KEY)
    state = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        state,
        state_sharding(state, mesh),
    )
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    data, key = jax.device_put((data, KEY), everywhere)
    advance = make_advance(algorithm, 4, schedule, 2)
    found = advance.lower(state, data, key, 0, 1).compile().memory_analysis()
    total = found.temp_size_in_bytes + found.argument_size_in_bytes
    total += found.output_size_in_bytes - found.alias_size_in_bytes
    assert plan.memory_bytes == pytest.approx(total, rel=0.25)


def test_lanes_are_as_many_as_fit():
    plan = Plan(
        1, 0, 0, 0, 0, 0, fixed_bytes=100, lane_bytes=30, server_bytes=70, lanes=8
    )
    assert plan.memory_bytes == 100 + 8 * 30
    assert plan._replace(lanes=1).memory_bytes == 100 + 70
    assert fitting_lanes([plan], 8, None) == (8, plan)
    assert fitting_lanes([plan], 8, 1000)[0] == 8
    assert fitting_lanes([plan], 8, 200)[0] == 3
    assert fitting_lanes([plan], 8, 171)[0] == 2
    assert fitting_lanes([plan], 8, 169)[0] == 0
    small = plan._replace(server_bytes=0)
    assert fitting_lanes([small, small._replace(lane_bytes=80)], 8, 200)[0] == 1
    assert fitting_lanes([small], 8, 120)[0] == 0

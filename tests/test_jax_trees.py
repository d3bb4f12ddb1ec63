"""`gradacc.jax.GradientAccumulator`: the engine, for gradients in pytrees."""

import collections
import dataclasses
import subprocess
import sys

import equinox as eqx
import gradacc
import gradacc.jax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given
from hypothesis import strategies as st

Layer = collections.namedtuple("Layer", "w b")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    scale: jax.Array
    layers: list


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node of a kind that gives no keys."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def full(tree, value):
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value, leaf.dtype), tree)


TREES = {
    "nested": lambda: {"b": [Layer(jnp.zeros((2, 3)), None)], "a": (jnp.zeros(()), {"ü": jnp.zeros((4, 0))})},
    "leaf": lambda: jnp.zeros(3),
    "dataclass": lambda: Block(jnp.zeros(()), [jnp.zeros(2)]),
    "custom": lambda: Pair(jnp.zeros(2), Pair(jnp.zeros(1), None)),
    "ordered": lambda: collections.OrderedDict(z=jnp.zeros(1), a=jnp.zeros(2)),
    "linen": lambda: linen.Dense(4).init(jax.random.key(0), jnp.ones((1, 3))),
    "nnx": lambda: nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param),
    "equinox": lambda: eqx.filter(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), eqx.is_inexact_array),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_mean_has_the_structure_of_the_parameters(tree):
    tree = tree()
    acc = gradacc.jax.GradientAccumulator(jax.eval_shape(lambda: tree), every=2)
    assert [acc.add(full(tree, value), weight) for value, weight in ((1.0, 1), (4.0, 3))] == [False, True]
    mean = acc.take().tree()
    assert jax.tree.structure(mean) == jax.tree.structure(tree)
    for leaf, like in zip(jax.tree.leaves(mean), jax.tree.leaves(tree), strict=True):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
        assert (leaf == 3.25).all()


def test_ids_are_key_paths():
    tree = {"layers": [Layer(1.0, 2.0)], "block": Block(3.0, [4.0]), "n": {7: 5.0}, "pair": Pair(6.0, 7.0)}
    assert gradacc.jax.GradientAccumulator(jax.tree.map(jnp.float32, tree)).ids == [
        "block/scale",
        "block/layers/0",
        "layers/0/w",
        "layers/0/b",
        "n/7",
        "pair/0",
        "pair/1",
    ]


KEYS = st.text("a/~012", max_size=3)
DICTS = st.recursive(st.just(1.0), lambda children: st.dictionaries(KEYS, children, min_size=1, max_size=4))


@given(DICTS)
def test_ids_never_collide(tree):
    tree = jax.tree.map(np.float32, tree)
    acc = gradacc.jax.GradientAccumulator(tree)
    assert len(set(acc.ids)) == len(jax.tree.leaves(tree))


def test_keys_that_read_the_same():
    zero = jnp.zeros(())
    tree = collections.OrderedDict([(3, {"w": zero}), ("3", {"w": zero})])
    acc = gradacc.jax.GradientAccumulator(tree)
    assert acc.ids == ["3/w", "3/w~2"]
    acc.add(collections.OrderedDict([(3, {"w": zero + 1}), ("3", {"w": zero + 2})]))
    assert [leaf.item() for leaf in jax.tree.leaves(acc.take().tree())] == [1, 2]


def test_missing_gradients_are_none():
    acc = gradacc.jax.GradientAccumulator({"a": jnp.zeros(2), "b": [jnp.zeros(1), jnp.zeros(1)], "none": None})
    acc.add({"a": jnp.full(2, 4.0), "b": [None, None], "none": None})
    acc.add({"a": None, "b": [jnp.ones(1), None], "none": None})
    tree = acc.take().tree()
    assert tree["a"].tolist() == [2, 2]
    assert tree["b"][0].tolist() == [0.5]
    assert (tree["b"][1], tree["none"]) == (None, None)


def test_a_micro_batch_in_parts():
    acc = gradacc.jax.GradientAccumulator({"a": jnp.zeros(2), "b": jnp.zeros(1)})
    with acc.micro_batch(weight=2):
        acc.add_part({"a": jnp.ones(2), "b": None})
        acc.add_part({"a": jnp.ones(2), "b": jnp.ones(1)})
    assert jax.tree.map(lambda leaf: leaf.tolist(), acc.take().tree()) == {"a": [2.0, 2.0], "b": [1.0]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"a": jnp.ones(2), "b": [jnp.ones(2)], "c": 1}, r"at its root: 'c' too many"),
        ({"a": jnp.ones(2)}, r"at its root: 'b' missing"),
        ({"a": jnp.ones(2), "b": (jnp.ones(2),)}, r"in 'b': a tuple in place of a list"),
        ({"a": jnp.ones(2), "b": [jnp.ones(2), None]}, r"in 'b': '1' too many"),
        ({"a": jnp.ones(2), "b": None}, r"in 'b': None in place of a list"),
        (None, "at its root: None in place of a dict"),
        ({"a": {"x": jnp.ones(2)}, "b": [jnp.ones(2)]}, "a: expected"),
        ({"a": jnp.ones(2), "b": [jnp.ones(3)]}, r"b/0: expected shape"),
        ({"a": jnp.ones(2), "b": [2.0]}, "b/0: "),
    ],
)
def test_a_wrong_tree_is_refused_and_says_where(wrong, message):
    acc = gradacc.jax.GradientAccumulator({"a": jnp.zeros(2), "b": [jnp.zeros(2)]})
    with pytest.raises(gradacc.GradaccError, match=message):
        acc.add(wrong)
    assert acc.count == 0


def test_traced_gradients_are_sent_to_the_functional_form():
    acc = gradacc.jax.GradientAccumulator({"w": jnp.zeros(2)})
    with pytest.raises(gradacc.GradaccError, match=r"'w'.*jit.*gradacc\.jax\.init, add and take"):
        jax.jit(lambda g: acc.add(g))({"w": jnp.ones(2)})
    with pytest.raises(gradacc.GradaccError, match=r"weight.*gradacc\.jax\.init, add and take"):
        jax.jit(lambda weight: acc.add({"w": jnp.ones(2)}, weight))(2.0)


def test_nodes_that_differ_in_what_is_no_leaf_or_refuse_other_leaves():
    one, other = (jax.tree_util.Partial(function, jnp.ones(2)) for function in (jnp.sin, jnp.cos))
    with pytest.raises(gradacc.GradaccError, match="in place of"):
        gradacc.jax.GradientAccumulator(one).add(other)

    @jax.tree_util.register_pytree_node_class
    class Strict(Pair):
        @classmethod
        def tree_unflatten(cls, _, children):
            if any(isinstance(child, str) for child in children):
                raise ValueError("no strings")
            return cls(*children)

    with pytest.raises(gradacc.GradaccError, match="another tree"):
        gradacc.jax.GradientAccumulator(Strict(jnp.ones(2))).add([jnp.ones(2)])


def test_gradients_on_other_devices_are_sent_to_the_functional_form():
    code = """
import gradacc.jax, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
spread = jax.device_put(jnp.ones(4), NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data")))
acc = gradacc.jax.GradientAccumulator({"w": spread})
try:
    acc.add({"w": spread})
except gradacc.GradaccError as error:
    print(error)
acc.add({"w": jax.device_put(jnp.ones(4), jax.devices()[1])})
print(acc.take().tree()["w"].tolist())
"""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n" + code,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    message, values = done.stdout.splitlines()
    assert "'w'" in message
    assert "gradacc.jax.init" in message
    assert values == "[1.0, 1.0, 1.0, 1.0]"


def test_bfloat16_both_ways():
    acc = gradacc.jax.GradientAccumulator([jnp.zeros(2, jnp.bfloat16)], dtype=jnp.bfloat16)
    acc.add([jnp.full(2, 3.0, jnp.bfloat16)])
    acc.add([np.full(2, 4.0, ml_dtypes.bfloat16)])
    grads = acc.take()
    (array,) = grads.tree()
    assert (array.dtype, array.tolist()) == (jnp.bfloat16, [3.5, 3.5])
    assert grads.numpy()["0"].dtype == ml_dtypes.bfloat16


def test_clipping_is_that_of_optax():
    tree = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray(4.0)}
    for limit in (1.0, 4.999, 5.0, 7.0, 0.0):
        acc = gradacc.jax.GradientAccumulator(tree)
        acc.add(tree)
        grads = acc.take()
        assert grads.clip_(limit) == 5.0
        expected, _ = optax.clip_by_global_norm(limit).update(tree, optax.EmptyState())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-7), grads.tree(), expected)
    acc.add({**tree, "b": jnp.asarray(jnp.nan)})
    grads = acc.take()
    assert np.isnan(grads.clip_(1.0))
    assert jnp.isnan(grads.tree()["a"]).all()
    for wrong in (-1.0, float("nan")):
        with pytest.raises(gradacc.ArgumentError, match="max_norm"):
            grads.clip_(wrong)


def test_what_trees_do_not_have():
    acc = gradacc.jax.GradientAccumulator({"w": jnp.zeros(2)})
    with pytest.raises(gradacc.ArgumentError, match="tree"):
        acc.register("v", jnp.zeros(2))
    with pytest.raises(gradacc.ArgumentError, match="torch"):
        acc.attach(object())
    with pytest.raises(gradacc.DtypeError, match="n"):
        gradacc.jax.GradientAccumulator({"w": jnp.zeros(2), "n": 3})


def test_state_goes_on_in_another_accumulator(tmp_path):
    tree = {"w": jnp.arange(3.0), "b": [jnp.ones(())]}
    first, second, unbroken = (gradacc.jax.GradientAccumulator(tree, every=2) for _ in range(3))
    for acc in (first, unbroken):
        acc.add(tree, 0.3)
    first.save(tmp_path / "window")
    second.load(tmp_path / "window")
    for acc in (second, unbroken):
        assert acc.add(tree, 0.7)
    jax.tree.map(np.testing.assert_array_equal, second.take().tree(), unbroken.take().tree())

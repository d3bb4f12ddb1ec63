"""A window that was saved goes on bit for bit, and what is no state of this accumulator changes nothing."""

import json
import os
import pathlib
import pickle
import stat
import struct
import subprocess
import sys

import gradacc
import numpy as np
import pytest

PARAMS = {"a": ((3, 2), "float32"), "b": ((4,), "float64"), "z": ((2,), "complex64"), 7: ((), "float16")}


def accumulator(**options):
    return gradacc.GradientAccumulator(PARAMS, **options)


def gradients(seed):
    rng = np.random.default_rng(seed)
    grads = {id: np.asarray(rng.normal(size=shape)).astype(dtype) for id, (shape, dtype) in PARAMS.items()}
    return grads if seed % 2 else {**grads, "b": None}


def bits(acc):
    grads = acc.take()
    return grads.count, grads.weight, grads.rejected, {id: x.tobytes() for id, x in grads.numpy().items()}


def counters(acc):
    return acc.window, acc.every, acc.until_weight, acc.count, acc.weight, acc.rejected, acc.complete


def file(source, target, path):
    source.save(path)
    target.load(path)


def dictionary(source, target, path):
    target.load_state_dict(pickle.loads(pickle.dumps(source.state_dict())))


ways = pytest.mark.parametrize("way", [file, dictionary])


@ways
@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("options", [{"every": 4}, {"every": {0: 1, 1: 4}}, {"until_weight": 8}], ids=str)
def test_a_window_goes_on_wherever_it_was_interrupted(options, position, way, tmp_path):
    unbroken, first, second = (accumulator(**options) for _ in range(3))
    for acc in (unbroken, first):
        acc.add(gradients(99))
        acc.take()
    for seed in range(4):
        unbroken.add(gradients(seed), weight=2, scale=0.3)
    for seed in range(position):
        first.add(gradients(seed), weight=2, scale=0.3)
    second.add(gradients(77))
    way(first, second, tmp_path / "window")
    assert counters(second) == counters(first)
    for seed in range(position, 4):
        second.add(gradients(seed), weight=2, scale=0.3)
    assert bits(second) == bits(unbroken)


def test_a_resumed_window_keeps_its_length_and_the_next_has_that_of_the_schedule():
    first, second = accumulator(every=4), accumulator(until_weight=2)
    first.add(gradients(1))
    second.load_state_dict(first.state_dict())
    assert (second.every, second.until_weight) == (4, None)
    second.take()
    assert (second.every, second.until_weight) == (None, 2)


def test_nothing_is_saved_in_the_middle_of_a_micro_batch_or_of_a_broken_window(tmp_path):
    acc = accumulator()
    saves = (acc.state_dict, lambda: acc.save(tmp_path / "window"))

    def save_between_parts():
        with acc.micro_batch():
            acc.add_part({"b": np.ones(4)})
            for save in saves:
                with pytest.raises(gradacc.WindowError, match="micro-batch is open"):
                    save()
            raise KeyError

    with pytest.raises(KeyError):
        save_between_parts()
    with pytest.raises(gradacc.WindowError, match="broken"):
        acc.state_dict()
    assert list(tmp_path.iterdir()) == []
    acc.load_state_dict(accumulator().state_dict())  # which replaces the broken one
    acc.add(gradients(1))


def test_a_file_replaces_another_whole_and_leaves_nothing_beside_it(tmp_path, monkeypatch):
    path, acc = tmp_path / "window.safetensors", accumulator()
    before = os.umask(0o027)
    try:
        acc.save(str(path))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    acc.add(gradients(1))
    acc.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    link = tmp_path / "latest"
    link.symlink_to(path.name)
    acc.save(link)
    assert link.is_symlink()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", path.name]
    monkeypatch.chdir(tmp_path)
    acc.save("here")
    acc.load(pathlib.Path("here"))


def test_paths_that_do_not_serve_are_os_errors(tmp_path):
    acc = accumulator()
    with pytest.raises(FileNotFoundError) as caught:
        acc.load(tmp_path / "none")
    assert caught.value.filename == str(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        acc.save(tmp_path / "no folder" / "window")
    with pytest.raises(OSError, match="directory"):
        acc.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ids_in_a_file_are_told_apart(tmp_path):
    ids = [7, "7", "#7", "##7", "", "__metadata__", -1]
    first, second = (gradacc.GradientAccumulator(dict.fromkeys(order, ((), "float32"))) for order in (ids, ids[::-1]))
    first.add([np.float32(i) for i in range(len(ids))])
    file(first, second, tmp_path / "window")
    assert {id: float(x) for id, x in second.take().numpy().items()} == dict(zip(ids, range(len(ids)), strict=True))


def rewritten(path, change):
    """The file with its header changed."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def metadata(**entries):
    return lambda header: header["__metadata__"].update(entries)


def without(key):
    return lambda header: header["__metadata__"].pop(key)


def params(**entries):
    def change(header):
        table = json.loads(header["__metadata__"]["params"])
        table[0].update(entries)
        header["__metadata__"]["params"] = json.dumps(table)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (metadata(version="2"), "version 1.* got 2"),
        (metadata(format="pt"), "gradacc"),
        (lambda header: header.pop("__metadata__"), "metadata"),
        (without("weight"), "lack weight"),
        (metadata(weight="nan"), "weight"),
        (metadata(weight="-1"), "weight"),
        (metadata(count="minus one"), "count"),
        (metadata(count="0"), "micro-batch"),
        (metadata(every="0"), "every"),
        (metadata(until_weight="3"), "both"),
        (metadata(has_sums="false"), "sums"),
        (metadata(params="[{}]"), "params"),
        (metadata(params="[]"), "knows? nothing|not in the state"),
        (params(name="c"), "c: the sum of it is missing"),
        (params(shape=[2, 3]), "a: its sum is not what"),
        (params(dtype="float64"), "a: its sum is not what"),
        (params(dtype="int8"), "a: .*int8"),
        (params(seen="never"), "tensors"),
        (params(seen="often"), "often"),
        (lambda header: header.update(x=header.pop("sums/b")), "b: the sum of it is missing"),
    ],
)
def test_a_file_that_makes_no_sense_says_why_and_changes_nothing(change, says, tmp_path):
    acc, path = accumulator(every=4), tmp_path / "window"
    acc.add(gradients(1))
    acc.save(path)
    acc.add(gradients(2))
    before = counters(acc)
    rewritten(path, change)
    with pytest.raises(gradacc.StateError, match=says):
        acc.load(path)
    assert counters(acc) == before
    unbroken = accumulator(every=4)
    unbroken.add(gradients(1))
    unbroken.add(gradients(2))
    assert bits(acc) == bits(unbroken)


def entry(key, value):
    def change(state):
        state["params"]["a"][key] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.clear(), "no state_dict"),
        (lambda state: state.update(version=2), "version 1.* got 2"),
        (lambda state: state.pop("count"), "count"),
        (lambda state: state.update(weight="much"), "weight"),
        (lambda state: state.update(count=0), "micro-batch"),
        (lambda state: state.update(until_weight=2.0), "both"),
        (lambda state: state.update(params=[]), "params"),
        (lambda state: state["params"].pop("a"), "a is in this accumulator and not in the state"),
        (lambda state: state["params"].update(new=state["params"]["a"]), "new is in the state and not in this"),
        (entry("shape", (2, 3)), "parameter a: .*float32 array of shape"),
        (entry("dtype", "float64"), "parameter a: .*float64"),
        (entry("sums", None), "parameter a: it is written"),
        (entry("seen", "never"), "parameter a: it is never"),
        (entry("sums", np.zeros((3, 2))), "parameter a: .*float64"),
        (entry("sums", "text"), "parameter a"),
    ],
)
def test_a_dict_that_makes_no_sense_says_why_and_changes_nothing(change, says):
    acc = accumulator(every=4)
    acc.add(gradients(1))
    state = acc.state_dict()
    change(state)
    before = counters(acc)
    with pytest.raises(gradacc.StateError, match=says):
        acc.load_state_dict(state)
    assert counters(acc) == before
    unbroken = accumulator()
    unbroken.add(gradients(1))
    assert bits(acc) == bits(unbroken)


def test_a_state_that_is_loaded_is_copied():
    first, second = accumulator(), accumulator()
    first.add(gradients(1))
    state = first.state_dict()
    second.load_state_dict(state)
    for param in state["params"].values():
        param["sums"][...] = 0
    assert bits(second) == bits(first)


@pytest.mark.parametrize(("level", "threads"), [("scalar", "1"), ("scalar", "4"), (None, "1"), (None, "5")])
def test_a_window_goes_on_in_another_process_at_another_level_with_other_threads(level, threads, tmp_path):
    shape = (300, 1001)
    unbroken, first = (gradacc.GradientAccumulator({"w": (shape, "float16")}, every=4) for _ in range(2))

    def gradient(i):
        return np.random.default_rng(i).normal(size=shape).astype("float16")

    for i in range(4):
        unbroken.add({"w": gradient(i)}, weight=i + 0.3)
    for i in range(2):
        first.add({"w": gradient(i)}, weight=i + 0.3)
    first.save(tmp_path / "window")
    code = f"""
import gradacc, numpy as np
acc = gradacc.GradientAccumulator({{"w": ({shape}, "float16")}}, every=4)
acc.load({str(tmp_path / "window")!r})
for i in (2, 3):
    acc.add({{"w": np.random.default_rng(i).normal(size={shape}).astype("float16")}}, weight=i + 0.3)
grads = acc.take()
print(grads.norm().hex())
np.save({str(tmp_path / "mean.npy")!r}, grads.numpy()["w"])
"""
    environment = {**os.environ, "GRADACC_NUM_THREADS": threads} | ({"GRADACC_SIMD": level} if level else {})
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    grads = unbroken.take()
    assert float.fromhex(done.stdout) == grads.norm()
    assert np.load(tmp_path / "mean.npy").tobytes() == grads.numpy()["w"].tobytes()


def test_sums_in_foreign_byte_order_are_read_right():
    first, second = (gradacc.GradientAccumulator({"w": ((2,), "float32")}) for _ in range(2))
    first.add({"w": np.array([1, 2], "float32")})
    state = first.state_dict()
    state["params"]["w"]["sums"] = state["params"]["w"]["sums"].astype(">f4")
    second.load_state_dict(state)
    assert second.take().numpy()["w"].tolist() == [1, 2]


def test_states_that_claim_the_impossible():
    acc = gradacc.GradientAccumulator({"w": ((2,), "float32")})
    acc.add({"w": np.ones(2, "float32")})
    good = acc.state_dict()
    for change in ({"count": 2**64 - 1}, {"rejected": 2**63}, {"window": 2**64 - 1}):
        with pytest.raises(gradacc.StateError):
            acc.load_state_dict({**good, **change})
    for shape in (range(10**18), 3, [-1]):
        wrong = {"w": {**good["params"]["w"], "shape": shape}}
        with pytest.raises(gradacc.StateError):
            acc.load_state_dict({**good, "params": wrong})
    assert acc.count == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_only_a_regular_file_is_replaced_or_read(tmp_path):
    acc = gradacc.GradientAccumulator({"w": ((2,), "float32")})
    acc.add({"w": np.ones(2, "float32")})
    os.mkfifo(tmp_path / "pipe")
    for call in (acc.save, acc.load):
        with pytest.raises(OSError, match="regular file"):
            call(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "latest").symlink_to("not-there-yet")
    acc.save(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    acc.load(tmp_path / "not-there-yet")


def test_an_id_of_a_subclass_is_the_plain_one():
    class Key(str):
        def __str__(self):
            return "other"

    acc, other = (
        gradacc.GradientAccumulator({Key("w"): ((2,), "float32")}),
        gradacc.GradientAccumulator({"w": ((2,), "float32")}),
    )
    acc.add({Key("w"): np.ones(2, "float32")})
    other.load_state_dict(acc.state_dict())
    assert [type(id) for id in acc.ids] == [str]
    assert list(other.take()) == ["w"]

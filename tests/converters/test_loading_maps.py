"""load in processes of its own: aliasing, donation, memory, and the bytes that each process of several reads."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from dewconv.converters.importing import import_checkpoint
from dewconv.converters.source import open_source

BF16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN, INNER, LAYERS, VOCAB = 1024, 3072, 2, 4096


@pytest.fixture
def large(tiny, tmp_path):
    """Banks of some 60 MB whose axes eight devices divide."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB, "head_dim": 128}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": LAYERS}
    config = tiny.qwen3_config(**sizes, **heads)
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(0, 0.02, shape).astype(BF16)
        for name, shape in {
            "model.embed_tokens.weight": (VOCAB, HIDDEN),
            "lm_head.weight": (VOCAB, HIDDEN),
            "model.norm.weight": (HIDDEN,),
            **{f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in LAYER.items()},
        }.items()
    }
    source = tiny.write(tmp_path / "source", config, weights)
    import_checkpoint(open_source(source), tmp_path / "banks")
    return SimpleNamespace(banks=tmp_path / "banks", source=source, weights=weights)


LAYER = {
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (1024, HIDDEN),
    "self_attn.k_proj.weight": (1024, HIDDEN),
    "self_attn.v_proj.weight": (1024, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, 1024),
    "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
}

COMMON = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import dewconv
from dewconv.converters.trees import flatten

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024

def mapped(directory):
    '''(address ranges, resident bytes) of the maps of a directory's files'''
    ranges, resident, ours = [], 0, False
    for line in open("/proc/self/smaps"):
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            ours = directory in line
            if ours:
                ranges.append(tuple(int(end, 16) for end in words[0].split("-")) + (words[1],))
        elif ours and words[0] == "Rss:":
            resident += int(words[1]) * 1024
    return ranges, resident
"""


def run(code, *arguments, devices=1):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code, *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ALIAS = """
import time
dewconv.load(sys.argv[1])  # what a first load imports and compiles
before, start = status("RssAnon"), time.perf_counter()
model, variables = dewconv.load(sys.argv[1])
seconds, grown = time.perf_counter() - start, status("RssAnon") - before
ranges, resident = mapped(sys.argv[1])
outside = [path for path, array in flatten(variables["params"])
           if not any(low <= array.unsafe_buffer_pointer() < high for low, high, _ in ranges)]
print(json.dumps({"outside": outside, "count": len(list(flatten(variables["params"]))), "seconds": seconds,
                  "grown": grown, "resident": resident, "modes": sorted({mode for *_, mode in ranges})}))
"""


def test_every_array_is_the_map_itself(large):
    found = run(ALIAS, large.banks)
    assert found["outside"] == []
    assert found["count"] == 14
    assert found["modes"] == ["rw-p"]
    # Nothing is read and nothing is taken; a copy would be 60 MB.
    assert found["grown"] < 4 << 20
    assert found["resident"] < 4 << 20
    assert found["seconds"] < 2


DONATE = """
model, variables = dewconv.load(sys.argv[1])
given = dict(flatten(variables["params"]))
plain = {path: np.array(array) for path, array in given.items()}

@lambda step: jax.jit(step, donate_argnums=0)
def step(tree):
    return jax.tree.map(lambda leaf: -leaf, tree)

loss = jax.jit(lambda tree, tokens: model.apply(tree, tokens).sum())
for _ in range(2):  # the first gives the arrays that alias the files away
    variables = step(variables)
loss(variables, jnp.arange(4)[None]).block_until_ready()
same = all((np.asarray(array) == plain[path]).all() for path, array in flatten(variables["params"]))
print(json.dumps({"deleted": all(array.is_deleted() for array in given.values()), "same": bool(same)}))
"""


def test_a_donated_array_neither_crashes_nor_reaches_the_file(large):
    before = {path.name: path.read_bytes() for path in large.banks.glob("*.safetensors")}
    assert run(DONATE, large.banks) == {"deleted": True, "same": True}
    assert {path.name: path.read_bytes() for path in large.banks.glob("*.safetensors")} == before


WRITE = """
import ctypes
model, variables = dewconv.load(sys.argv[1])
array = variables["params"]["norm"]["scale"]
ctypes.memset(array.unsafe_buffer_pointer(), 0, array.nbytes)  # what XLA does when it uses the memory again
print(json.dumps(float(np.abs(np.asarray(array, np.float32)).sum())))
"""


def test_writing_to_the_memory_of_an_array_is_allowed_and_reaches_no_file(large):
    before = (large.banks / "top.safetensors").read_bytes()
    assert run(WRITE, large.banks) == 0.0
    assert (large.banks / "top.safetensors").read_bytes() == before


SHARDED = """
from dataclasses import replace
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from dewconv.converters import leaves, regions

read = {}
def counted(parameter, name):
    def count(region):
        array = parameter.read(region)
        read[name] = read.get(name, 0) + array.nbytes
        return array
    return replace(parameter, read=count)

original = leaves.bank_parameters
from dewconv.converters import loading
loading.bank_parameters = lambda banks: {name: counted(item, name) for name, item in original(banks).items()}

def load_sharded(path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    def spec(name, shape):
        if len(shape) == 3:
            return P(None, "x")  # the rows of every layer's matrix
        return P("x") if len(shape) == 2 and not name.startswith("layers") else P()
    model, variables = dewconv.load(path, mesh=mesh, shardings=spec)
    for _, array in flatten(variables["params"]):
        for piece in array.addressable_shards:
            np.asarray(piece.data).view(np.uint8).max()
    return model, variables, mapped(path)[1]
"""

EIGHT = (
    SHARDED
    + """
model, variables, resident = load_sharded(sys.argv[1])
held = dict(flatten(variables["params"]))
print(json.dumps({
    "read": read,
    "bytes": {path: array.nbytes for path, array in held.items()},
    "resident": resident,
    "shards": {path: [list(s.data.shape) for s in array.addressable_shards] for path, array in held.items()},
    "sum": float(sum(np.abs(np.asarray(array, np.float64)).sum() for array in held.values())),
}))
"""
)


def total(large):
    return float(sum(np.abs(array.astype(np.float64)).sum() for array in large.weights.values()))


def test_eight_devices_of_one_process_read_every_byte_once(large):
    found = run(EIGHT, large.banks, devices=8)
    assert found["read"] == found["bytes"]
    assert found["sum"] == pytest.approx(total(large), rel=1e-12)
    assert found["shards"]["layers_0_1/mlp/up_proj/kernel"] == [[2, HIDDEN // 8, INNER]] * 8
    assert found["shards"]["norm/scale"] == [[HIDDEN]] * 8


TWO = (
    SHARDED
    + """
path, port, rank = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
assert len(jax.devices()) == 8 and len(jax.local_devices()) == 4
model, variables, resident = load_sharded(path)
held = dict(flatten(variables["params"]))
local = {path: {str(s.index): s.data.nbytes for s in array.addressable_shards} for path, array in held.items()}
low = dewconv.load(path, mesh=jax.sharding.Mesh(np.array(jax.devices()), ("x",)), dtype="float32")[1]
assert low["params"]["embed_tokens"]["embedding"].dtype == jnp.float32
split = [p for p, a in held.items() if not a.is_fully_replicated]
print(json.dumps({
    "read": read,
    "held": {path: sum(pieces.values()) for path, pieces in local.items()},
    "resident": resident,
    "split": split,
    "sum": float(sum(np.abs(np.asarray(s.data, np.float64)).sum() for p in split for s in held[p].addressable_shards)),
}))
"""
)


def test_two_processes_read_each_what_their_devices_hold(large):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", COMMON + TWO, str(large.banks), port, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], told
    found = [json.loads(out.splitlines()[-1]) for out, _ in told]
    whole = sum(array.nbytes for array in large.weights.values())
    for one in found:
        # The second load, of everything, read what `held` has not: replicated parameters once more, split ones whole.
        first = {path: size - _again(one, path) for path, size in one["read"].items()}
        assert first == one["held"]
        assert sum(one["held"].values()) < 0.51 * whole
        # What the system mapped for it: pages come with their neighbours, 2 MB at a time on some systems.
        assert 0.98 * sum(one["held"].values()) < one["resident"] < 0.85 * whole
    split = [name for name, array in large.weights.items() if array.ndim == 2]
    expected = sum(np.abs(large.weights[name].astype(np.float64)).sum() for name in split)
    assert sum(one["sum"] for one in found) == pytest.approx(float(expected), rel=1e-12)


def _again(one, path):
    return 2 * one["held"][path] if path in one["split"] else one["held"][path]


CHECKPOINT = """
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
def spec(name, shape):
    return P(*(None,) * (len(shape) - 1), "x") if len(shape) > 1 and shape[-1] % 8 == 0 else P()
_, ours = dewconv.load(sys.argv[1], mesh=mesh, shardings=spec)
_, plain = dewconv.load(sys.argv[1])
plain = dict(flatten(plain["params"]))
print(json.dumps(all((np.asarray(a) == np.asarray(plain[p])).all() for p, a in flatten(ours["params"]))))
"""


def test_a_checkpoint_directory_is_sharded_too(large):
    assert run(CHECKPOINT, large.source, devices=8) is True

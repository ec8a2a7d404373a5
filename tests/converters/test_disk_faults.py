"""Disks that fill up and files that cannot be read any more, at many points: OUT is absent or whole, and what stood
there stays until the new one is."""

import os
import signal
import subprocess
import sys

import pytest
from failing_disk import mount
from slowed_command import finish, interfere, partial
from test_cli import dewconv_command

POINTS = 8


@pytest.fixture
def work(tiny, tmp_path):
    """A source of 16 kB matrices, what import and export make of it, and their arguments before OUT."""
    sizes = {"hidden_size": 96, "intermediate_size": 80, "vocab_size": 300, "head_dim": 24}
    config = tiny.qwen3_config(**sizes, num_hidden_layers=3)
    shapes = {
        "input_layernorm": (96,),
        "post_attention_layernorm": (96,),
        "self_attn.q_norm": (24,),
        "self_attn.k_norm": (24,),
        "self_attn.q_proj": (96, 96),
        "self_attn.k_proj": (48, 96),
        "self_attn.v_proj": (48, 96),
        "self_attn.o_proj": (96, 96),
        "mlp.gate_proj": (80, 96),
        "mlp.up_proj": (80, 96),
        "mlp.down_proj": (96, 80),
    }
    names = {"model.embed_tokens.weight": (300, 96), "lm_head.weight": (300, 96), "model.norm.weight": (96,)}
    names |= {f"model.layers.{i}.{name}.weight": shape for i in range(3) for name, shape in shapes.items()}
    bf16 = tiny.weights_of(config)["model.norm.weight"].dtype
    weights = {name: tiny.random_bits(shape, bf16, seed) for seed, (name, shape) in enumerate(names.items())}
    tiny.write(tmp_path / "source", config, weights, shards=3)
    given = {"import": ("import", "../source"), "export": ("export", "../banks")}
    (tmp_path / "there").mkdir()
    made, counts = {}, {}
    for verb, out in (("import", "banks"), ("export", "back")):
        written, _ = finish(tmp_path / "there", *given[verb], f"../{out}")
        made[verb], counts[verb] = tiny.files_of(tmp_path / out), len(written)
    return given, made, counts


def other_result(tiny, tmp_path, verb, at):
    """An OUT that another import or export left at `at`, to be replaced."""
    if verb == "import":
        finish(tmp_path, "import", tiny.qwen3("other").path, at)
    else:
        finish(tmp_path, "import", tiny.qwen3("other").path, "other-banks")
        finish(tmp_path, "export", "other-banks", at)
    return tiny.files_of(at)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB of its own."""
    at = tmp_path / "there"
    at.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", at], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield at
    subprocess.run(["umount", at], check=True)


def fill(at):
    """Takes all that is free, to the last byte."""
    with (at / "ballast").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


@pytest.mark.parametrize("verb", ["import", "export"])
def test_a_disk_that_fills_up_at_many_points(tiny, tmp_path, work, small_disk, verb):
    given, made, counts = work
    before = other_result(tiny, tmp_path, verb, small_disk / "old")
    ended = []
    for out, options in (("new", ()), ("old", ("--overwrite",))):
        for point in range(POINTS):
            writes = 1 + point * counts[verb] // POINTS
            code, said = interfere(writes, lambda: fill(small_disk), small_disk, *given[verb], out, *options)
            (small_disk / "ballast").unlink()
            ended.append(code)
            assert partial(small_disk) == []
            if code:
                assert code == 2
                assert "No space left" in said
                assert not (small_disk / "new").exists()
                assert tiny.files_of(small_disk / "old") == before
            else:
                # By then it had taken all the room it needed.
                assert tiny.files_of(small_disk / out) == made[verb]
                subprocess.run(["rm", "-r", small_disk / out], check=True)
                if out == "old":
                    before = other_result(tiny, tmp_path, verb, small_disk / "old")
    assert ended.count(2) > POINTS
    finish(small_disk, *given[verb], "old", "--overwrite")
    assert tiny.files_of(small_disk / "old") == made[verb]


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path, work, small_disk):
    given, _, _ = work
    fill(small_disk)
    code, said = interfere(0, lambda: None, small_disk, *given["import"], "new")
    assert code == 2
    assert "free" in said
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


def test_a_disk_that_filled_up_is_gone_on_with_once_there_is_room(tiny, tmp_path, work, small_disk):
    given, made, counts = work
    writes = counts["import"] // 2
    code, said = interfere(writes, lambda: fill(small_disk), small_disk, *given["import"], "new", "--resume")
    assert code == 2
    assert partial(small_disk)[0] in said
    (small_disk / "ballast").unlink()
    written, _ = finish(small_disk, *given["import"], "new", "--resume")
    assert 0 < len(written) < counts["import"]
    assert tiny.files_of(small_disk / "new") == made["import"]
    assert partial(small_disk) == []


LIMITED = """
import resource, signal, sys
from dewconv.cli import run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(run(sys.argv[2:]))
"""


@pytest.mark.parametrize("verb", ["import", "export"])
def test_a_file_that_may_not_grow_further(tiny, tmp_path, work, verb):
    given, made, _ = work
    at = tmp_path / "there"
    before = other_result(tiny, tmp_path, verb, at / "old")
    largest = max(len(data) for data in made[verb].values())
    for point in range(POINTS):
        limit = largest * point // POINTS
        arguments = [str(limit), *given[verb], "old", "--overwrite", "-q"]
        done = subprocess.run([sys.executable, "-c", LIMITED, *arguments], cwd=at, capture_output=True, text=True)
        assert done.returncode == 2, limit
        assert "File too large" in done.stderr
        assert tiny.files_of(at / "old") == before
        assert [path.name for path in at.iterdir()] == ["old"]


@pytest.mark.parametrize("verb", ["import", "export"])
def test_what_is_read_is_cut_off_at_many_points(tiny, tmp_path, work, verb):
    given, made, counts = work
    at = tmp_path / "there"
    before = other_result(tiny, tmp_path, verb, at / "old")
    read = {
        "import": tmp_path / "source" / "model-00002-of-00003.safetensors",
        "export": tmp_path / "banks" / "layers_0_2.safetensors",
    }[verb]
    whole = read.read_bytes()
    ended = []
    for point in range(POINTS):
        for out, options in (("new", ()), ("old", ("--overwrite",))):
            writes = 1 + point * (counts[verb] - 40) // POINTS
            code, said = interfere(writes, lambda: os.truncate(read, 4096), at, *given[verb], out, *options)
            read.write_bytes(whole)
            ended.append(code)
            # Cut off between being asked for and being touched, a page still ends the process.
            assert code in (2, -signal.SIGBUS)
            assert not (at / "new").exists()
            assert tiny.files_of(at / "old") == before
            if code == 2:
                assert "cut off since it was opened" in said or "damaged" in said or "changed" in said, said
                assert partial(at) == []
            else:
                subprocess.run(["rm", "-r", *(at / name for name in partial(at))], check=True)
    assert ended.count(2) > len(ended) * 3 // 4
    finish(at, *given[verb], "old", "--overwrite")
    assert tiny.files_of(at / "old") == made[verb]


@pytest.mark.parametrize("verb", ["import", "export"])
def test_a_disk_that_cannot_read_at_many_points(tiny, tmp_path, work, verb):
    _, made, _ = work
    at, seen = tmp_path / "there", tmp_path / "seen"
    before = other_result(tiny, tmp_path, verb, at / "old")
    source, name = {
        "import": ("source", "model-00002-of-00003.safetensors"),
        "export": ("banks", "layers_0_2.safetensors"),
    }[verb]
    size = (tmp_path / source / name).stat().st_size
    seen.mkdir()
    try:
        disk = mount(tmp_path / source, seen)
    except PermissionError:
        pytest.skip("needs the right to mount a file system")
    with disk:
        for point in range(1, POINTS, 2):
            for out, options in (("new", ()), ("old", ("--overwrite",))):
                disk.good[name], disk.refused = point * size // POINTS // 4096 * 4096, 0
                done = dewconv_command(verb, seen, out, *options, "--quiet", cwd=at)
                assert (done.returncode, disk.refused > 0) == (2, True), done.stderr
                assert "cannot be read" in done.stderr
                assert "Traceback" not in done.stderr
                assert not (at / "new").exists()
                assert tiny.files_of(at / "old") == before
                assert partial(at) == []
        disk.good.clear()
        done = dewconv_command(verb, seen, "old", "--overwrite", "--quiet", cwd=at)
    assert done.returncode == 0, done.stderr
    back = at / "old"
    if verb == "import":
        finish(tmp_path, "export", at / "old", "again")
        back = tmp_path / "again"
        made = {"export": tiny.files_of(tmp_path / "back")}
    assert tiny.files_of(back) == made["export"]


def test_a_side_file_that_goes_away_ends_the_import(tiny, tmp_path, work):
    given, _, counts = work
    merges = tmp_path / "source" / "merges.txt"
    for point in range(4):
        writes = 1 + point * counts["import"] // 4
        code, said = interfere(writes, merges.unlink, tmp_path / "there", *given["import"], "new")
        merges.write_bytes(b"a b\n")
        assert code == 2
        assert "merges.txt: cannot be read" in said
        assert list((tmp_path / "there").iterdir()) == []


def test_what_is_replaced_is_exchanged_in_one_step(tiny, tmp_path, work):
    """There is no moment at which OUT is neither the old one nor the new one."""
    given, made, _ = work
    at = tmp_path / "there"
    other_result(tiny, tmp_path, "import", at / "old")
    code = (
        "import os, sys\n"
        "from dewconv.converters import staging\n"
        "from dewconv.cli import run\n"
        "original = os.rename\n"
        "def rename(*names):\n"
        "    original(*names)\n"
        "    os.kill(os.getpid(), 9)\n"
        "staging.os.rename = rename\n"
        "staging.shutil.rmtree = lambda *a, **k: os.kill(os.getpid(), 9)\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, *given["import"], "old", "--overwrite", "-q"]
    assert subprocess.run(command, cwd=at).returncode == -9
    assert tiny.files_of(at / "old") == made["import"]

"""The real command ended at many points and gone on with: the same bytes, written once."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from slowed_command import end_after, finish, partial, start

from dewconv.converters.banks import check_banks, open_banks
from dewconv.converters.resuming import JOURNAL, Journal, leftovers, reopen_for
from dewconv.converters.source import open_source
from dewconv.families import ConversionError

POINTS = 10


@pytest.fixture
def work(tiny, tmp_path):
    """(verb -> arguments before OUT, verb -> the files of a whole result, verb -> bytes of tensors)."""
    source = tiny.qwen3("source", shards=2).path
    finish(tmp_path, "import", source, "banks")
    finish(tmp_path, "export", "banks", "back")
    given = {"import": ("import", source), "export": ("export", "banks")}
    whole = {"import": tiny.files_of(tmp_path / "banks"), "export": tiny.files_of(tmp_path / "back")}
    total = sum(header.data_bytes for header in open_banks(tmp_path / "banks").headers.values())
    return given, whole, total


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("verb", ["import", "export"])
def test_what_is_done_is_not_done_again_and_the_bytes_are_the_same(tiny, tmp_path, work, how, verb):
    given, whole, total = work
    count = len(finish(tmp_path, *given[verb], "new")[0])
    subprocess.run(["rm", "-r", tmp_path / "new"], check=True)
    for point in range(POINTS):
        writes = 1 + point * (count - 8) // POINTS
        code, said = end_after(writes, how, tmp_path, *given[verb], "new", "--resume")
        assert code in (2, -how), "it was over before the signal came"
        assert not (tmp_path / "new").exists()
        (left,) = partial(tmp_path)
        if how == signal.SIGINT:
            assert left in said
            assert "--resume" in said
        noted = Journal.reopen(tmp_path / left)
        assert noted is not None
        noted[0].close()
        written, _ = finish(tmp_path, *given[verb], "new", "--resume")
        assert sum(size for *_, size in written) == total - noted[0].done
        assert tiny.files_of(tmp_path / "new") == whole[verb]
        assert partial(tmp_path) == []
        subprocess.run(["rm", "-r", tmp_path / "new"], check=True)


def test_one_import_ended_again_and_again_gets_there(tiny, tmp_path, work):
    given, whole, _ = work
    done = []
    for _ in range(40):
        code, _ = end_after(20, signal.SIGKILL, tmp_path, *given["import"], "new", "--resume")
        if code == 0:
            break
        (left,) = partial(tmp_path)
        held = Journal.reopen(tmp_path / left)
        held[0].close()
        done.append(held[0].done)
    else:
        finish(tmp_path, *given["import"], "new", "--resume")
    assert done == sorted(done)
    assert len(set(done)) >= 3
    assert tiny.files_of(tmp_path / "new") == whole["import"]


@pytest.mark.parametrize("verb", ["import", "export"])
def test_what_the_checksums_do_not_vouch_for_is_done_again(tiny, tmp_path, work, verb):
    given, whole, _ = work
    end_after(40, signal.SIGKILL, tmp_path, *given[verb], "new", "--resume")
    (left,) = partial(tmp_path)
    left = tmp_path / left
    lines = [json.loads(line) for line in (left / JOURNAL).read_text().splitlines()[1:]]
    last = {(line["file"], line["tensor"]): line["bytes"] for line in lines}
    (file, tensor), size = max(last.items(), key=lambda item: item[1])
    assert size > 0
    raw = (left / file).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    begin = json.loads(raw[8 : 8 + length])[tensor]["data_offsets"][0] + 8 + length
    with (left / file).open("r+b") as damaged:
        damaged.seek(begin + size - 1)
        damaged.write(bytes([raw[begin + size - 1] ^ 1]))
    written, _ = finish(tmp_path, *given[verb], "new", "--resume")
    again = [(f, t) for f, t, offset, _ in written if last.get((f, t), 0) > offset]
    assert set(again) == {(file, tensor)}
    assert tiny.files_of(tmp_path / "new") == whole[verb]


def test_a_tampered_journal_is_not_believed(tiny, tmp_path, work):
    given, whole, _ = work
    end_after(20, signal.SIGKILL, tmp_path, *given["import"], "new", "--resume")
    journal = tmp_path / partial(tmp_path)[0] / JOURNAL
    entries = open_banks(tmp_path / "banks").headers["layers_0_2.safetensors"].entries
    lie = {"file": "layers_0_2.safetensors", "checksums": {"xxh3": "0" * 16}}
    with journal.open("a") as file:
        for name, entry in entries.items():
            file.write(json.dumps(lie | {"tensor": name, "bytes": entry.nbytes}) + "\n")
        file.write('{"file": 3}\nno JSON\n[]\n{"file": "top.safetensors", "tensor"')
    finish(tmp_path, *given["import"], "new", "--resume")
    assert tiny.files_of(tmp_path / "new") == whole["import"]


def change_bytes(source):
    shard = source / "model-00002-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return shard.name


def change_config(source):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"transformers_version": "4.52.0"}))
    return "config.json"


def change_side_file(source):
    (source / "merges.txt").write_bytes(b"c d\n")
    return "merges.txt"


def add_side_file(source):
    (source / "added.txt").write_bytes(b"x")
    return "added.txt"


@pytest.mark.parametrize("change", [change_bytes, change_config, change_side_file, add_side_file])
def test_a_source_that_changed_in_between_is_refused_by_name(tiny, tmp_path, work, change):
    given, _, _ = work
    end_after(20, signal.SIGKILL, tmp_path, *given["import"], "new", "--resume")
    name = change(tmp_path / "source")
    before = tiny.files_of(tmp_path)
    process = start(tmp_path, *given["import"], "new", "--resume")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "another source" in said
    assert name in said
    assert partial(tmp_path)[0] in said
    assert tiny.files_of(tmp_path) == before


def test_a_source_that_was_only_moved_is_the_same(tiny, tmp_path, work):
    given, whole, _ = work
    end_after(20, signal.SIGKILL, tmp_path, *given["import"], "new", "--resume")
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    finish(tmp_path, "import", "elsewhere", "new", "--resume")
    made = tiny.files_of(tmp_path / "new")
    assert {name for name, data in whole["import"].items() if made[name] != data} == {"dewconv.json"}
    assert check_banks(open_banks(tmp_path / "new")) == []


@pytest.mark.parametrize(
    ("verb", "options", "said"),
    [
        ("import", ("--dtype", "float32"), "other options: dtype"),
        ("import", ("--sha256",), "other options: checksums"),
        ("import", ("--bank-layers", "2"), "other options: bank_layers"),
        ("export", ("--dtype", "float32"), "other options: config"),
        ("export", ("--max-shard-size", "20kB"), "other options: index"),
    ],
)
def test_other_options_are_refused(tmp_path, work, verb, options, said):
    given, _, _ = work
    end_after(20, signal.SIGKILL, tmp_path, *given[verb], "new", "--resume")
    process = start(tmp_path, *given[verb], "new", "--resume", *options)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said in told


def test_banks_that_changed_in_between_are_refused(tiny, tmp_path, work):
    given, _, _ = work
    end_after(20, signal.SIGKILL, tmp_path, *given["export"], "new", "--resume")
    finish(tmp_path, "import", tiny.qwen3("other", shards=2, rms_norm_eps=1e-5).path, "banks", "--overwrite")
    process = start(tmp_path, *given["export"], "new", "--resume")
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "other options: config" in told


def test_sha256_is_vouched_for_too(tiny, tmp_path, work):
    given, _, _ = work
    end_after(30, signal.SIGKILL, tmp_path, *given["import"], "new", "--resume", "--sha256")
    finish(tmp_path, *given["import"], "new", "--resume", "--sha256")
    finish(tmp_path, *given["import"], "plain", "--sha256")
    assert tiny.files_of(tmp_path / "new") == tiny.files_of(tmp_path / "plain")


def test_without_resume_nothing_is_gone_on_from_and_what_was_left_is_named(tiny, tmp_path, work):
    given, whole, _ = work
    end_after(20, signal.SIGKILL, tmp_path, *given["import"], "new")
    (left,) = partial(tmp_path)
    assert leftovers(tmp_path / "new") == [tmp_path / left]
    command = [sys.executable, "-m", "dewconv", *map(str, given["import"]), "other"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr == ""
    done = subprocess.run([*command[:-1], "new"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert left in done.stderr
    assert "--resume" in done.stderr
    assert tiny.files_of(tmp_path / "new") == whole["import"]
    assert partial(tmp_path) == [left]


def test_what_was_left_without_resume_can_be_gone_on_from(tiny, tmp_path, work):
    given, whole, total = work
    end_after(30, signal.SIGKILL, tmp_path, *given["import"], "new")
    written, _ = finish(tmp_path, *given["import"], "new", "--resume")
    assert 0 < sum(size for *_, size in written) < total
    assert tiny.files_of(tmp_path / "new") == whole["import"]
    assert partial(tmp_path) == []


def test_what_another_process_still_writes_is_left_to_it(tiny, tmp_path, work):
    given, whole, _ = work
    running = start(tmp_path, *given["import"], "new", pause=0.05)
    for _ in range(10):
        running.stdout.readline()
    other = start(tmp_path, *given["import"], "new", "--resume")
    _, told = other.communicate(timeout=60)
    assert other.returncode == 2
    assert "another process is writing it" in told
    assert leftovers(tmp_path / "new") == []
    running.communicate(timeout=60)
    assert running.returncode == 0
    assert tiny.files_of(tmp_path / "new") == whole["import"]


def test_overwrite_and_resume_keep_the_old_until_the_new_is_whole(tiny, tmp_path, work):
    given, whole, _ = work
    finish(tmp_path, "import", tiny.qwen3("other").path, "old")
    before = tiny.files_of(tmp_path / "old")
    for writes in (1, 20, 40):
        code, _ = end_after(writes, signal.SIGKILL, tmp_path, *given["import"], "old", "--overwrite", "--resume")
        assert code == -signal.SIGKILL
        assert tiny.files_of(tmp_path / "old") == before
    finish(tmp_path, *given["import"], "old", "--overwrite", "--resume")
    assert tiny.files_of(tmp_path / "old") == whole["import"]
    assert partial(tmp_path) == []


def test_of_several_that_were_left_the_one_with_the_most_done_is_taken(tmp_path):
    identity = {"options": {"a": 1}, "source": {}, "files": {}}
    for number, size in enumerate((10, 30, 20)):
        (tmp_path / f".out.0000000{number}.partial").mkdir()
        journal = Journal(tmp_path / f".out.0000000{number}.partial", identity)
        journal.note("f", "t", size, {"xxh3": "0" * 16})
        journal.close()
    (tmp_path / ".out.0000000f.partial").mkdir()  # killed before it had a journal
    path, journal = reopen_for(tmp_path / "out", identity)
    journal.close()
    assert path.name == ".out.00000001.partial"
    with pytest.raises(ConversionError, match=r"other options: a changed"):
        reopen_for(tmp_path / "out", {**identity, "options": {"a": 2}})
    assert reopen_for(tmp_path / "ou", identity) is None


def test_a_name_of_spaces_and_letters_of_other_scripts(tiny, tmp_path, work):
    given, whole, _ = work
    out = "neu [ü] *"
    end_after(20, signal.SIGKILL, tmp_path, *given["import"], out, "--resume")
    written, _ = finish(tmp_path, *given["import"], out, "--resume")
    assert written
    assert tiny.files_of(tmp_path / out) == whole["import"]
    assert partial(tmp_path) == []


def test_time_is_not_what_decides_between_equal_files(tmp_path, tiny):
    """A hub cache's files are the blobs they link to: fetched again, they are the same ones at another time."""
    source = tmp_path / "models--org--name" / "snapshots" / "abc"
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    tiny.qwen3("plain")
    source.mkdir(parents=True)
    for number, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        if path.is_file():
            path.rename(blobs / f"{number:064x}")
            (source / path.name).symlink_to(f"../../blobs/{number:064x}")
    end_after(20, signal.SIGKILL, tmp_path, "import", source, "new", "--resume")
    for blob in blobs.iterdir():
        os.utime(blob, (time.time() + 5, time.time() + 5))
    written, _ = finish(tmp_path, "import", source, "new", "--resume")
    assert 0 < sum(size for *_, size in written) < open_source(source).weight_bytes
    assert check_banks(open_banks(tmp_path / "new")) == []

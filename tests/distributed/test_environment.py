import itertools
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from numpy.testing import assert_array_equal
from tables import read_table

import jaxtp
from jaxtp.config.entry import UserError
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.distributed import environment as launch
from jaxtp.generate import __main__ as generate
from jaxtp.generate import loading
from jaxtp.train import setup
from jaxtp.train.__main__ import main as training

SKIP = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def test_cuda_library_check_is_skipped_without_a_gpu(tmp_path, monkeypatch):
    devices = [tmp_path / name for name in ("nvidia0", "nvidiactl", "dxg")]
    monkeypatch.setattr(launch, "NVIDIA", devices)

    def accepted(**environment):
        launch.accept_absent_gpus(environment)
        return environment

    assert accepted() == {SKIP: "1"}
    assert accepted(**{SKIP: ""}) == {SKIP: ""}
    for device in devices[1:]:
        device.touch()
        assert accepted() == {}
        device.unlink()


def test_visible_gpus_follow_cuda_visible_devices():
    counts = read_table(__file__)
    assert len(launch.names_of_gpus(4, {})) == 4
    assert {
        listed: len(launch.names_of_gpus(4, {"CUDA_VISIBLE_DEVICES": listed})) for listed in counts
    } == counts


CACHE = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_enable_xla_caches",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of programs, in a temporary cache; JAX's configuration names no folder."""
    before = {name: getattr(jax.config, name) for name in CACHE}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path / "jaxtp/programs"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_gpu_programs_are_cached_and_damaged_entries_recompiled(kept, capsys):
    compute = lambda: np.asarray(jax.jit(lambda x: 3 * x + 1)(np.arange(4.0, dtype=np.float32)))
    launch.enable_compilation_cache("gpu")
    assert_array_equal(compute(), [1, 4, 7, 10])
    (program,) = kept.glob("jit__lambda*-cache")
    assert_array_equal(compute(), [1, 4, 7, 10])
    program.write_bytes(program.read_bytes()[:100])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert_array_equal(compute(), [1, 4, 7, 10])
    assert kept.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().err == ""


def test_cache_stays_off_on_cpus_in_several_processes_and_if_configured(kept, monkeypatch):
    for asked, platform, processes in ((None, "cpu", 1), (None, "gpu", 2), ("own", "gpu", 1)):
        jax.config.update("jax_compilation_cache_dir", asked)
        monkeypatch.setattr(jax, "process_count", lambda processes=processes: processes)
        launch.enable_compilation_cache(platform)
        assert jax.config.jax_compilation_cache_dir == asked
        assert jax.config.jax_enable_compilation_cache
        assert not kept.exists()


def test_empty_cache_folder_turns_the_cache_off(kept):
    jax.config.update("jax_compilation_cache_dir", "")
    launch.enable_compilation_cache("gpu")
    assert not jax.config.jax_enable_compilation_cache
    assert not kept.exists()


def test_unusable_cache_folder_prints_one_line(kept, capsys):
    """A file is in the folder's place, or others can write to the folder."""
    for make in (
        kept.parent.touch,
        lambda: (kept.parent.unlink(), kept.mkdir(parents=True), kept.chmod(0o777)),
    ):
        make()
        launch.enable_compilation_cache("gpu")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("the compilation cache is off: [Errno ")
        assert str(kept) in line
        assert jax.config.jax_compilation_cache_dir is None


def test_cache_evicts_least_recently_used_programs(tmp_path):
    (tmp_path / "gone").symlink_to("nowhere")  # as if another process had just deleted it
    for age, name in itertools.product(range(4), "ab"):
        (tmp_path / f"{name}{age}").write_bytes(b"x" * 10)
        os.utime(tmp_path / f"{name}{age}", (1e9 - age, 1e9 - age))
    launch.evict_oldest(tmp_path, limit=45)
    assert {path.name for path in tmp_path.iterdir()} == {"a0", "b0", "a1", "b1", "gone"}


@pytest.mark.parametrize(
    ("module", "main", "flags"),
    [
        (setup, training, ["--data.path=nowhere.txt"]),
        (loading, generate.main, ["--model=.", "--prompt=a"]),
    ],
)
def test_computing_commands_enable_the_cache(module, main, flags, monkeypatch):
    """A mistake stops each command after its devices are known, and before anything is compiled."""
    asked = []
    monkeypatch.setattr(module, "enable_compilation_cache", lambda *one, **_: asked.extend(one))
    source = SimpleNamespace(
        config=jaxtp.ModelConfig(),
        stored=SimpleNamespace(load=_refuse),
        tokenizer=ByteTokenizer(),
        prefix=(),
        context=None,
        end_ids=frozenset(),
    )
    monkeypatch.setattr(generate, "open_source", lambda *_: source)
    assert main([*flags]) == 2
    assert asked == ["cpu"]


def _refuse(config, mesh):
    raise UserError("no weights")

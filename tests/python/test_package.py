"""The package around the operators: imports, versions, the doctor, the C interface."""

import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

import moiety
from moiety import _lib, errors


def python(code, **environment):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600,
                          env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


NO_TORCH = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'torch': raise ImportError('no torch here')
sys.meta_path.insert(0, Gone())
"""


def test_without_torch_the_package_imports():
    out = python(NO_TORCH + "import moiety\nprint(moiety.__version__, 'torch' in sys.modules)\n"
                 "print(moiety.build_info()['operators_error'])\n"
                 "from moiety import _lib\nprint(_lib.key_remap({'keys': [], 'modules': [], 'form': 'packed'}))")
    assert out.splitlines() == [f"{moiety.__version__} False", "no torch here", "[]"]


def test_without_torch_checkpoints_are_read(tmp_path):
    from moiety import checkpoint

    model = torch.nn.Linear(3, 2)
    checkpoint.save(tmp_path, model)
    out = python(NO_TORCH + f"from moiety import checkpoint\npath = {str(tmp_path)!r}\n"
                 "print(checkpoint.describe(path)['step'], checkpoint.read(path)['weight'].tolist(), "
                 "'torch' in sys.modules)")
    assert out == f"0 {model.weight.tolist()} False\n"


def other_pythons():
    """Those of 3.10 to 3.13 that are installed."""
    for minor in range(10, 14):
        found = shutil.which(f"python3.{minor}")
        if found and minor != sys.version_info.minor and subprocess.run(
                [found, "--version"], capture_output=True).returncode == 0:  # a shim of pyenv may lead nowhere
            yield found


def test_one_package_serves_every_python():
    code = ("import moiety; from moiety import checkpoint\n"
            "assert moiety.build_info()['version'] == moiety.__version__\n"
            "try: checkpoint.describe('/nowhere')\n"
            "except moiety.CheckpointError as error: assert 'nowhere' in str(error)\n"
            "else: raise AssertionError('nothing raised')")
    place = pathlib.Path(moiety.__file__).parent.parent
    for other in other_pythons():
        done = subprocess.run([other, "-c", code], capture_output=True, text=True, timeout=600,
                              env={**os.environ, "PYTHONPATH": str(place)})
        assert done.returncode == 0, (other, done.stderr)


def test_import_alone_loads_neither_torch_nor_the_library():
    assert python("import moiety, sys; print('torch' in sys.modules, 'ctypes' in sys.modules)") == \
        "False False\n"


def test_import_of_the_modules_is_quick_after_torch():
    # Time of the processor, since other processes make the clock's time longer; the best of three.
    code = ("import time, torch; a = time.process_time(); import moiety.nn, moiety.te; "
            "print(time.process_time() - a, torch.cuda.is_initialized())")
    runs = [python(code).split() for _ in range(3)]
    assert min(float(seconds) for seconds, _ in runs) < 0.3
    assert all(initialized == "False" for _, initialized in runs)


def test_fork_works_after_import_and_use():
    python("""
import os, torch
from moiety import ops
run = lambda: ops.grouped_linear(torch.ones(4, 8), torch.ones(2, 3, 8), torch.tensor([1, 3]))
child = os.fork()
if child == 0:
    os._exit(0 if (run() == 8).all() else 1)
assert os.waitpid(child, 0)[1] == 0
assert (run() == 8).all()
""")


def resident():
    """Bytes of this process that are in memory."""
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_thousand_calls_leak_nothing():
    from moiety import nn

    layer = nn.MoELayer(64, 64, 8, 2)
    x = torch.randn(128, 64, requires_grad=True)  # a step's tensors take more than a megabyte

    def calls(count):
        for number in range(count):
            x.grad = None
            layer.zero_grad()
            layer(x).y.sum().backward()
            with pytest.raises(moiety.InvalidArgument):
                layer.experts(x, [129, 0, 0, 0, 0, 0, 0, 0] if number % 2 else [1] * 7)
        gc.collect()  # an error and its frames are a cycle

    calls(100)
    grown = []  # a leak grows every time; the heap settles
    for _ in range(3):
        before = resident()
        calls(400)
        grown.append(resident() - before)
    assert min(grown) < 6 << 20


@pytest.mark.parametrize("version,good", [("2.10.0", False), ("2.11.0+cu130", True), ("2.13.0+cpu", True),
                                          ("3.0.0", True), ("2.9.1", False), ("1.13", False)])
def test_versions_of_torch(version, good):
    fault = _lib.torch_version_fault(version)
    assert (fault is None) == good
    if fault:
        assert version in fault and "2.11" in fault and "pip install" in fault


def test_doctor():
    done = subprocess.run([sys.executable, "-m", "moiety.doctor", "--json"], capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["torch"] == torch.__version__ and found["checks"]
    text = subprocess.run([sys.executable, "-m", "moiety.doctor"], capture_output=True, text=True,
                          timeout=600).stdout
    assert "engine_float32" in text and torch.__version__ in text


INTERRUPTED = """
import signal, time
from moiety import _lib
_lib.core()
start, ran = time.monotonic(), []
def handler(number, frame):
    ran.append(time.monotonic() - start)
    if {raises}: raise KeyboardInterrupt("of the handler")
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.02)
try:
    _lib.call_json("moiety_doctor", b".", 1)
    said = "ended"
except KeyboardInterrupt:
    said = "interrupted"
took = time.monotonic() - start
print(said, len(ran), ran[0] < 0.75 * took or took - ran[0] > 0.1)
_lib.call_json("moiety_doctor", b".", 0)  # the next call is a new one
"""


@pytest.mark.parametrize("raises,said", [(True, "interrupted"), (False, "ended")])
def test_a_long_call_runs_handlers_and_ends_when_one_raises(raises, said):
    found = python(INTERRUPTED.format(raises=raises)).split()
    assert found[:2] == [said, "1"] and (raises or found[2] == "True")


def test_errors_are_also_pythons_own():
    for ours, theirs in [(moiety.InvalidArgument, ValueError), (moiety.Unsupported, NotImplementedError),
                         (moiety.IoError, OSError), (moiety.OutOfMemory, MemoryError)]:
        assert issubclass(ours, theirs) and issubclass(ours, moiety.Error)
    assert issubclass(moiety.Error, RuntimeError)
    error = errors.from_text("moiety[Unsupported] moiety::x: y is z\nException raised from here")
    assert isinstance(error, moiety.Unsupported) and str(error) == "moiety::x: y is z"
    assert errors.from_text("another error") is None


def test_counters_and_build_info():
    assert _lib.counters() == {"allocations": 0, "waits": 0}
    info = moiety.build_info()
    assert info["version"] == moiety.__version__ and info["operators"].endswith("libmoiety_torch.so")


def test_key_remap_errors_by_class():
    with pytest.raises(moiety.InvalidArgument, match="form is 'x'"):
        _lib.key_remap({"keys": [], "modules": [], "form": "x"})
    with pytest.raises(moiety.CheckpointError):
        _lib.key_remap({"keys": [{"name": "a.weight0", "shape": [2, 2]}],
                        "modules": [{"name": "a", "experts": 3}], "form": "packed"})


def test_one_run_time_of_openmp():
    from moiety import ops  # noqa: F401

    found = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
    assert len(found) <= 1, found

#!/usr/bin/env python3
"""What happens to a run of two processes on two GPUs, whose steps are captured, when one of them dies or
stands still; whether the run then goes on with the bits of one that nothing happened to; and whether
all ways to start ranks give the same bits.

    gpu_faults.py PROGRAM [--long STEPS] [unittest arguments, such as GpuFaults.test_killed -v]

--long: also a run of so many steps (100000 take some minutes). Standard library alone. Ends with 77, which ctest takes for skipped, where fewer than two GPUs are visible.
"""
import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "apps"))
import runs
from runs import Run, checkpoint, records, saving, steps, tiny, wait_for, wait_for_step

LONG = 0
LIMIT = 5.0  # seconds until all know of it; of a stopped process behind the deadline
DEADLINE = 3.0
STEPS = 400

# Takes the memory of a GPU but for so many bytes, until its input ends.
HOG = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name}: {code}")
device, context, taken = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), int(sys.argv[1]))
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
call("cuMemAlloc_v2", ctypes.byref(taken), ctypes.c_size_t(free.value - int(sys.argv[2])))
print("taken", flush=True)
sys.stdin.read()
"""


def train(arguments, limit=runs.LIMIT, **how):
    run = Run(arguments, **how)
    return run.wait(limit), run


class GpuFaults(unittest.TestCase):
    EP = 1  # parallel.ep

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="moiety-gpu-faults-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)

    def arguments(self, name, count=STEPS, **more):
        options = dict(run__device="cuda", precision__recipe="bf16", guard__comm_timeout_s=DEADLINE,
                       checkpoint__interval=20, checkpoint__keep_last=1000, model__d_model=64,
                       data__seq_len=128)
        options.update(more)
        return tiny(f"{self.dir}/{name}", 2, self.EP, count, **options)

    def ends(self, run, since, limit, named):
        code = run.wait(limit + 20)
        took = time.monotonic() - since
        self.assertEqual(code, 7, run.tail())
        self.assertLess(took, limit, run.tail())
        self.assertEqual(len(run.messages()), 1, run.tail())
        self.assertRegex(run.messages()[0], named)
        print(f"{self.id().split('.')[-1]}: {took:.2f} s: {run.messages()[0]}", file=sys.stderr)

    def goes_on(self, name):
        """The run goes on from its last checkpoint; its steps are those of a whole run."""
        code, run = train(self.arguments("whole"), ranks=2, own=True)
        self.assertEqual(code, 0, run.tail())
        code, run = train(self.arguments(name), ranks=2, own=True)
        self.assertEqual(code, 0, run.tail())
        whole, rest = steps(f"{self.dir}/whole"), steps(f"{self.dir}/{name}")
        self.assertEqual(sorted(rest)[-1], STEPS)
        for step, figures in rest.items():
            self.assertEqual(figures, whole[step], step)

    def test_killed(self):
        for victim in (0, 1):
            name = f"killed{victim}"
            run = Run(self.arguments(name, 1000000), ranks=2, own=True)
            wait_for_step(f"{self.dir}/{name}", 45)
            os.kill(run.rank_pids()[victim], signal.SIGKILL)
            self.ends(run, time.monotonic(), LIMIT,
                      rf"rank {victim} \(pid [0-9]+\) is gone \(signal 9, Killed\)")

    def test_stopped(self):
        run = Run(self.arguments("stopped", 1000000), ranks=2, own=True)
        wait_for_step(f"{self.dir}/stopped", 45)
        os.kill(run.rank_pids()[1], signal.SIGSTOP)
        self.ends(run, time.monotonic(), DEADLINE + LIMIT, "rank 1")

    def test_killed_while_it_saves(self):
        run = Run(self.arguments("saves", 1000000, checkpoint__interval=2), ranks=2, own=True)
        wait_for_step(f"{self.dir}/saves", 10)
        wait_for(lambda: saving(f"{self.dir}/saves"))
        os.kill(run.rank_pids()[1], signal.SIGKILL)
        self.ends(run, time.monotonic(), LIMIT, "rank 1")

    def test_killed_at_the_start(self):
        """In the first step, which is not captured, or a little before."""
        for wait in (0.0, 0.3, 0.6):
            run = Run(self.arguments(f"start{wait}", 1000000), ranks=2, own=True)
            wait_for(lambda: len(run.rank_pids()) == 2)
            wait_for(lambda: os.path.exists(f"{self.dir}/start{wait}/metrics.jsonl"))
            time.sleep(wait)
            os.kill(run.rank_pids()[1], signal.SIGKILL)
            self.ends(run, time.monotonic(), LIMIT, "rank 1")

    def test_killed_in_capture(self):
        """Behind the first step the next one is captured."""
        run = Run(self.arguments("capture", 1000000), ranks=2, own=True)
        wait_for_step(f"{self.dir}/capture", 1)
        os.kill(run.rank_pids()[1], signal.SIGKILL)
        self.ends(run, time.monotonic(), LIMIT, "rank 1")

    def test_out_of_memory(self):
        """The GPU of one rank is full: both end with 8, and there is one message."""
        with subprocess.Popen([sys.executable, "-c", HOG, "1", str(4 << 30)], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
            self.assertEqual(hog.stdout.readline(), "taken\n")
            code, run = train(self.arguments("full", model__d_model=2048, model__layers=4, model__heads=16,
                                             moe__experts=32, moe__d_ffn=2048), ranks=2, own=True)
            hog.stdin.close()
        self.assertEqual(code, 8, run.tail())
        self.assertEqual(len(run.messages()), 1, run.tail())
        self.assertRegex(run.messages()[0], "out of memory before the first step; a rank needs")
        print(f"test_out_of_memory: {run.messages()[0]}", file=sys.stderr)

    def test_a_rank_takes_memory_of_its_own_gpu_alone(self):
        """No thread of a rank, of those that write checkpoints neither, makes a context on another."""
        if self.EP > 1:
            self.skipTest("experts change nothing here")
        for asynchronous in ("true", "false"):
            before, name = used_memory(), f"own-{asynchronous}"
            run = Run(self.arguments(name, 1000000, checkpoint__async=asynchronous), ranks=2, own=True)
            wait_for_step(f"{self.dir}/{name}", 45)
            one, other = (now - then for now, then in zip(used_memory(), before))
            run.process.send_signal(signal.SIGTERM)
            self.assertEqual(run.wait(), 75, run.tail())
            self.assertLess(abs(one - other), 200, (one, other))  # a context has more
            print(f"memory of both GPUs, checkpoint.async={asynchronous}: {one} and {other} MiB",
                  file=sys.stderr)

    def test_goes_on_bitwise(self):
        """A run that was killed behind a checkpoint."""
        run = Run(self.arguments("cut"), ranks=2, own=True)
        wait_for(lambda: os.path.exists(checkpoint(f"{self.dir}/cut", 20) + "/COMMIT"))
        os.kill(run.rank_pids()[0], signal.SIGKILL)
        self.assertIn(run.wait(), (0, 7), run.tail())  # 0: it was too late
        self.goes_on("cut")

    @unittest.skipUnless("--long" in sys.argv, "without --long")
    def test_long(self):
        """Replays with changing data: losses are finite, and the GPUs' memory stays as it was. Where
        tokens are exchanged their numbers change, too: every expert has room for all."""
        code, run = train(self.arguments("long", LONG, checkpoint__interval=0, log__every=100,
                                         model__d_model=32, data__seq_len=32, moe__capacity_factor=-1),
                          1200, ranks=2, own=True)
        self.assertEqual(code, 0, run.tail())
        kept = [r for r in records(f"{self.dir}/long") if "event" not in r]
        self.assertEqual(kept[-1]["step"], LONG)
        self.assertTrue(all(math.isfinite(r["loss"]) and not r["skipped"] for r in kept))
        if self.EP > 1:
            routings = {tuple(r["rank_bal"]) for r in kept}
            self.assertGreater(len(routings), 50)
        memory = {r["mem"] for r in kept if r["step"] > 1000}
        self.assertLess(max(memory) - min(memory), 1 << 20, memory)  # the driver's: 64 KiB have been seen
        print(f"long: {len(kept)} records, last loss {kept[-1]['loss']}, mem {memory}, "
              f"step {kept[-1]['step_ms']:.3f} ms", file=sys.stderr)

    def test_sigterm_saves(self):
        run = Run(self.arguments("term", 1000000), ranks=2, own=True)
        wait_for_step(f"{self.dir}/term", 30)
        os.kill(run.rank_pids()[1], signal.SIGTERM)
        self.assertEqual(run.wait(), 75, run.tail())


class GpuFaultsOfExperts(GpuFaults):
    """The same where the two processes exchange tokens: kernels of the exchange wait for the one that is
    gone."""
    EP = 2
    test_killed_while_it_saves = test_sigterm_saves = None


class GpuLaunches(unittest.TestCase):
    """However its ranks are started, and whatever carries what they send, a run has the same bits."""
    DEVICE = "cuda"
    WAYS = {"processes": dict(own=True), "threads": {}, "mpirun": dict(mpi=True),
            "nccl": dict(own=True)}

    def test_bits(self):
        folder = tempfile.mkdtemp(prefix="moiety-gpu-launches-")
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        for tp in (1, 2):
            found = {}
            for way, how in self.WAYS.items():
                if way == "mpirun" and not shutil.which("mpirun"):
                    continue
                name = f"{folder}/{way}-tp{tp}"
                code, run = train(tiny(name, 2, 1, 20, run__device=self.DEVICE, parallel__tp=tp,
                                       train__micro_batch=4 * tp, precision__recipe="bf16",
                                       comm__transport="nccl" if way == "nccl" else "auto"),
                                  ranks=2, **how)
                self.assertEqual(code, 0, run.tail())
                found[way] = steps(name)
                self.assertEqual(sorted(found[way])[-1], 20)
            for way, figures in found.items():
                self.assertEqual(figures, found["processes"], f"{way}, tp {tp}")


def used_memory():
    """MiB of each visible GPU that are used, by whomever; none where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", os.environ["CUDA_VISIBLE_DEVICES"]]
    try:
        out = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return []
    return [int(line) for line in out.stdout.split()] if out.returncode == 0 else []


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("program")
    parser.add_argument("--long", type=int, default=0)
    a, rest = parser.parse_known_args()
    global LONG
    LONG = a.long
    if len(used_memory()) < 2:
        print("fewer than two GPUs are visible")
        sys.exit(77)
    runs.PROGRAM = os.path.realpath(a.program)
    unittest.main(argv=["gpu_faults.py"] + rest)


if __name__ == "__main__":
    main()

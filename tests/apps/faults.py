#!/usr/bin/env python3
"""What happens to `moiety train` when something goes wrong: signals, kills, stalls, full disks, short
memory, values that are not finite; with ranks as threads and as processes of mpirun.

    faults.py PROGRAM [--kills N] [--seed S] [unittest arguments, such as Faults.test_dead_rank -v]

Standard library alone. The cases of processes are skipped where there is no mpirun, or the program
finds no MPI. --kills N: kill -9 at N random moments (default 6; 200 is the long form).
"""
import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

from poke import poke

PROGRAM = ""
KILLS = 6
MPIRUN = ["mpirun", "--enable-recovery", "--allow-run-as-root", "--oversubscribe"]
LIMIT = 60  # seconds, for anything that should end by itself


def tiny(run_dir, ranks=1, ep=1, steps=6, **more):
    """Arguments of a run whose steps take milliseconds."""
    options = {
        "run.dir": run_dir, "parallel.ep": ep, "train.micro_batch": 8 // ranks,
        "train.global_batch": 8, "train.steps": steps, "model.d_model": 32, "model.layers": 2,
        "model.heads": 4, "moe.experts": 4, "moe.d_ffn": 32, "router.aux_scope": "global",
        "data.synthetic": "markov", "data.seq_len": 16, "optim.lr": 0.01, "optim.warmup_steps": 3,
        "precision.recipe": "fp32", "log.peak_tflops": 1, "log.tensorboard": "false",
        "log.plot_every": 0, "log.every": 1,
    }
    options.update({name.replace("__", "."): value for name, value in more.items()})
    return ["train"] + [f"--{name}={value}" for name, value in options.items()]


# Steps of about 20 ms, so that there is time to do something to the run.
SLOWER = {"model__d_model": 64, "moe__d_ffn": 128, "data__seq_len": 128}


class Run:
    """A run under way: `ranks` threads of one process, or processes under mpirun."""

    def __init__(self, arguments, ranks=1, mpi=False, prefix=(), env=None, preexec=None, last=()):
        """`last` are arguments that the last process has besides."""
        command = list(prefix) + [PROGRAM] + arguments
        number, self.err_path = tempfile.mkstemp()  # several processes append to it
        os.close(number)
        self.err_file = open(self.err_path, "a+b")
        if mpi:
            # With recovery mpirun does not say how ranks ended, and what it is told to pass on is
            # lost when it hangs itself, so ranks write to the file.
            tell_code = ["sh", "-c", 'exec 2>>"$0"; "$@"; echo "ended: $?" >&2', self.err_path]
            of_last = ["-np", "1"] + tell_code + command + list(last)
            others = ["-np", str(ranks - 1)] + tell_code + command
            command = MPIRUN + (others + [":"] if ranks > 1 else []) + of_last
        elif ranks > 1:
            command.append(f"--ranks={ranks}")
        self.mark = f"MOIETY_TEST_RUN={os.urandom(8).hex()}"
        name, value = self.mark.split("=")
        environment = dict(os.environ, **(env or {}), **{name: value})
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self.err_file,
                                        env=environment, preexec_fn=preexec)
        self.mpi, self.ranks = mpi, ranks

    def __del__(self):
        self.err_file.close()
        os.unlink(self.err_path)

    def wait(self, limit=LIMIT):
        """The exit code of all ranks (or, if they differ, the list); what does not end in time is
        killed."""
        try:
            if self.mpi:
                self.wait_for_mpirun(limit)
            else:
                self.process.wait(limit)
        except subprocess.TimeoutExpired:
            for pid in self.rank_pids():
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            raise AssertionError("did not end within %s s:\n%s" % (limit, self.tail()))
        if not self.mpi:
            return self.process.returncode
        codes = self.codes()
        return codes[0] if len(set(codes)) == 1 else codes

    def wait_for_mpirun(self, limit):
        """Open MPI 4's mpirun now and then stays when ranks are killed while they connect to it:
        what counts is that the ranks have ended."""
        end = time.monotonic() + limit
        alone = None
        while self.process.poll() is None:
            if alone is None and len(self.codes()) == self.ranks:
                alone = time.monotonic() + 5
            if alone and time.monotonic() > alone:
                self.process.kill()
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("mpirun", limit)
            time.sleep(0.01)

    def codes(self):
        """How the ranks under mpirun have ended so far."""
        return [int(c) for c in re.findall(r"^ended: (\d+)$", self.err(), re.M)]

    def err(self):
        self.err_file.seek(0)
        return self.err_file.read().decode(errors="replace")

    def tail(self):
        return "\n".join(self.err().splitlines()[-15:])

    def messages(self):
        """Lines of the program's errors, without what mpirun says."""
        return [line for line in self.err().splitlines() if line.startswith("moiety: ")]

    def rank_pids(self):
        """Of the processes that are ranks, by rank."""
        if not self.mpi:
            return [self.process.pid] if self.process.poll() is None else []
        pids = {}
        for entry in os.listdir("/proc"):
            try:
                if not entry.isdigit() or os.readlink(f"/proc/{entry}/exe") != PROGRAM:
                    continue
                with open(f"/proc/{entry}/environ", "rb") as f:
                    environment = f.read().decode(errors="replace")
            except OSError:
                continue
            rank = re.search(r"OMPI_COMM_WORLD_RANK=(\d+)", environment)
            if rank and self.mark in environment:
                pids[int(rank[1])] = int(entry)
        return [pids[r] for r in sorted(pids)]

    def kill_ranks(self, one):
        """kill -9 for all ranks, or for one of them."""
        pids = self.rank_pids()
        for pid in pids[:1] if one else pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def train(arguments, **how):
    run = Run(arguments, **how)
    return run.wait(), run


def records(run_dir):
    try:
        with open(f"{run_dir}/metrics.jsonl") as f:
            lines = f.read().splitlines()
    except OSError:
        return []
    out = []
    for line in lines:
        try:
            out.append(json.loads(line))
        except ValueError:  # cut by a kill
            pass
    return out


FIELDS = ("loss", "aux", "gnorm", "lr", "tokens")


def steps(run_dir):
    """step -> its figures, of its last record."""
    return {r["step"]: tuple(r[f] for f in FIELDS) for r in records(run_dir) if "event" not in r}


def events(run_dir, name):
    return [r for r in records(run_dir) if r.get("event") == name]


def wait_for(what, limit=30):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if what():
            return
        time.sleep(0.005)
    raise AssertionError("timed out")


def wait_for_step(run_dir, step):
    wait_for(lambda: any(s >= step for s in steps(run_dir)))


def checkpoint(run_dir, step):
    return f"{run_dir}/checkpoints/step-{step:08d}"


def checkpoint_names(run_dir, prefix):
    try:
        return [n for n in os.listdir(f"{run_dir}/checkpoints") if n.startswith(prefix)]
    except OSError:
        return []


def saving(run_dir):
    return bool(checkpoint_names(run_dir, ".tmp-step"))


def has_mpi():
    if not shutil.which("mpirun"):
        return False
    with tempfile.TemporaryDirectory() as d:
        code, run = train(tiny(d + "/r", 2, steps=1), ranks=2, mpi=True)
        if code != 0:
            print("no MPI: " + run.err().strip(), file=sys.stderr)
        return code == 0


class Faults(unittest.TestCase):
    mpi = None

    @classmethod
    def setUpClass(cls):
        if Faults.mpi is None:
            Faults.mpi = has_mpi()

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="moiety-faults-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)

    def launchers(self):
        """Both ways of running ranks, as keyword arguments of Run."""
        return [dict(mpi=False)] + ([dict(mpi=True)] if self.mpi else [])

    def need_mpi(self):
        if not self.mpi:
            self.skipTest("no MPI")

    def trained(self, name, ranks=1, ep=1, steps=6, mpi=False, **more):
        path = f"{self.dir}/{name}"
        code, run = train(tiny(path, ranks, ep, steps, **more), ranks=ranks, mpi=mpi)
        self.assertEqual(code, 0, run.tail())
        return path, run

    # ---- Threads and processes are the same.

    def test_processes_equal_threads(self):
        self.need_mpi()
        for ranks, ep in (2, 1), (2, 2), (4, 2):
            more = dict(precision__recipe="bf16", optim__state_dtype="bf16", router__bias_rate=0.01)
            threads, run_t = self.trained(f"t{ranks}{ep}", ranks, ep, **more)
            processes, run_p = self.trained(f"p{ranks}{ep}", ranks, ep, mpi=True, **more)
            self.assertEqual(len(steps(threads)), 6)
            self.assertEqual(steps(threads), steps(processes), (ranks, ep))

            def digests(path):
                with open(checkpoint(path, 6) + "/manifest.json") as f:
                    tensors = json.load(f)["tensors"]
                return {(t, s): e["digest"] for t in tensors for s, e in tensors[t]["slots"].items()}
            self.assertEqual(digests(threads), digests(processes))
            self.assertEqual(sorted(os.listdir(threads)), sorted(os.listdir(processes)))
            lines = [[l for l in run.err().splitlines() if l.startswith("step ")]
                     for run in (run_t, run_p)]
            self.assertEqual(len(lines[0]), len(lines[1]), run_p.err())  # one console

    def test_resume_across_layouts_and_launchers(self):
        self.need_mpi()
        whole, _ = self.trained("whole", 2, 2, checkpoint__interval=3, checkpoint__keep_last=10)
        for name, ranks, ep, same in (("same", 2, 2, True), ("other", 4, 2, False)):
            path = f"{self.dir}/{name}"
            shutil.copytree(checkpoint(whole, 3), checkpoint(path, 3))
            code, run = train(tiny(path, ranks, ep), ranks=ranks, mpi=True)
            self.assertEqual(code, 0, run.tail())
            self.assertEqual(sorted(steps(path)), [4, 5, 6])
            for step, figures in steps(path).items():
                if same:
                    self.assertEqual(figures, steps(whole)[step])
                for a, b in zip(figures, steps(whole)[step]):
                    self.assertLessEqual(abs(a - b), 1e-4 * abs(b))

    def test_capacity_that_is_too_small_repeats_the_step(self):
        more = dict(router__aux="none", moe__experts=8, moe__top_k=1)
        worst, _ = self.trained("worst", 4, 4, 12, moe__capacity_factor=-1, **more)
        for how in self.launchers():
            path, run = self.trained(f"auto{how['mpi']}", 4, 4, 12, **how, **more)
            self.assertIn(" is made again: experts now take ", run.err())
            self.assertEqual(steps(path), steps(worst))

    # ---- Launchers.

    def test_launchers(self):
        for variable in "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE":
            code, run = train(tiny(self.dir + "/r"), env={variable: "2"})
            self.assertEqual(code, 2, run.tail())
            self.assertIn(f"moiety: {variable} = 2: ", run.err().splitlines()[-1])
        if self.mpi:
            code, run = train(tiny(self.dir + "/r", 2) + ["--ranks=3"], ranks=2, mpi=True)
            self.assertEqual(code, 2, run.tail())
            self.assertIn("run.ranks = 3 (command line), but OMPI_COMM_WORLD_SIZE = 2", run.err())
            code, run = train(tiny(self.dir + "/s", 2) + ["--ranks=2"], ranks=2, mpi=True)
            self.assertEqual(code, 0, run.tail())

    def test_ranks_that_differ(self):
        # tests/apps_mpi goes over every key; here are the ways from a launch to the comparison.
        self.need_mpi()
        for path in "t", "u":
            with open(f"{self.dir}/{path}.txt", "w") as f:
                f.write(f"moiety trains {path} experts. " * 500)
            subprocess.run([PROGRAM, "prepare", f"{self.dir}/{path}.txt", "--tokenizer=bytes",
                            f"--out={self.dir}/{path}", "--quiet"], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        shutil.copy(self.dir + "/t.tok", self.dir + "/copy.tok")
        data = dict(data__synthetic="none", data__train=self.dir + "/t.tok")
        differ = {
            "--optim.lr=2e-3": "rank 1 has optim.lr = 0.002 (command line), rank 0 0.01",
            "--eval.every=2": "rank 1 has eval.every = 2 (command line), rank 0 0",
            "--model.preset=mixtral-8x7b": 'rank 1 has model.preset = "mixtral-8x7b" (command line), '
                                           'rank 0 "tiny"',
            "--dry-run": "rank 1 has --dry-run = true (command line), rank 0 false",
            "--print-config": "rank 1 has --print-config = true (command line), rank 0 false",
            "--optim.lr=fast": "rank 1 failed: --optim.lr=fast: optim.lr = fast: must be a number, >= 0",
            f"--data.train={self.dir}/u.tok": "rank 1 has data.train[0] = ",
            f"--data.valid={self.dir}/u.tok": "rank 1 has data.valid = 1 files",
        }
        for argument, message in differ.items():
            path = self.dir + "/r"
            code, run = train(tiny(path, 2, **data), ranks=2, mpi=True, last=[argument])
            self.assertEqual(code, 2, run.tail())
            self.assertEqual(len(run.messages()), 2, run.tail())
            for line in run.messages():
                self.assertTrue(line.startswith("moiety: " + message), line)
            self.assertFalse(os.path.exists(path), "nothing is made before ranks agree")
        # The same by another path, and what no result depends on.
        for argument in f"--data.train={self.dir}/copy.tok", "--run.threads=3", "--run.device=cpu":
            code, run = train(tiny(self.dir + "/s", 2, **data), ranks=2, mpi=True, last=[argument])
            self.assertEqual(code, 0, run.tail())
            shutil.rmtree(self.dir + "/s")
        os.mkdir(self.dir + "/elsewhere")
        code, run = train(tiny(self.dir + "/s", 2, **data), ranks=2, mpi=True,
                          last=[f"--run.dir={self.dir}/elsewhere"])
        self.assertEqual(code, 4, run.tail())
        self.assertIn("elsewhere is not the directory that rank 0 sees", run.messages()[-1])

    # ---- Values that are not finite.

    def test_nan_in_an_expert_is_named(self):
        path, _ = self.trained("r", 2, 2, 4)
        poke(checkpoint(path, 4), "layers.1.moe.experts.fc2.weight", [3, 5, 7], float("nan"))
        for guard, skipped in ("step", 3), ("tensor", 1):
            for how in self.launchers():
                copy = f"{self.dir}/{guard}{how['mpi']}"
                shutil.copytree(path, copy)
                code, run = train(tiny(copy, 2, 2, 20, guard__nan=guard), ranks=2, **how)
                self.assertEqual(code, 6, run.tail())
                for line in run.messages():
                    self.assertIn("layer 1, expert 3: weight layers.1.moe.experts.fc2.weight is nan "
                                  "at [3, 5, 7]", line)
                self.assertEqual(len(run.messages()), 2 if how["mpi"] else 1)
                self.assertEqual(len(events(copy, "skip")), skipped)
                step = 4 + skipped
                with open(f"{copy}/failures/rank1-step{step}.json") as f:
                    failure = json.load(f)
                self.assertEqual((failure["kind"], failure["layer"], failure["expert"]), ("nan", 1, 3))
                self.assertEqual((failure["index"], failure["value"]), ([3, 5, 7], "nan"))
                self.assertEqual(failure["statistics"]["nan"], 1)
                self.assertTrue(os.path.exists(f"{copy}/failures/rank0-step{step}.json"))

    # ---- Signals.

    def test_sigterm_again_and_again(self):
        whole, _ = self.trained("whole", 2, 2, 120, **SLOWER)
        for how in self.launchers():
            path = f"{self.dir}/stopped{how['mpi']}"
            code, stops = None, 0
            while code != 0:
                run = Run(tiny(path, 2, 2, 120, **SLOWER, data__prefetch=1 + stops % 5), ranks=2, **how)
                done = max(steps(path), default=0)
                if stops < 3:
                    pids = []
                    wait_for(lambda: pids.extend(run.rank_pids()) or pids)
                    wait_for_step(path, done + random.randint(1, 12))
                    os.kill(random.choice(pids), signal.SIGTERM)
                code = run.wait()
                stops += code == 75
                self.assertIn(code, (0, 75), run.err())
                last = max(steps(path))
                self.assertTrue(os.path.exists(checkpoint(path, last) + "/COMMIT"), run.tail())
            self.assertGreaterEqual(stops, 2)
            self.assertEqual(steps(path), steps(whole))

    def test_usr1_saves_and_goes_on(self):
        for how in self.launchers():
            path = f"{self.dir}/r{how['mpi']}"
            run = Run(tiny(path, 2, 2, 40, **SLOWER), ranks=2, **how)
            wait_for_step(path, 2)
            os.kill(run.rank_pids()[-1], signal.SIGUSR1)
            self.assertEqual(run.wait(), 0, run.tail())
            saved = [e["step"] for e in events(path, "checkpoint")]
            self.assertEqual(len(saved), 2, saved)
            self.assertLess(saved[0], 40)

    def test_hangup_saves_unless_it_is_ignored(self):
        for how in self.launchers():
            path = f"{self.dir}/r{how['mpi']}"
            run = Run(tiny(path, 2, 2, 400, **SLOWER), ranks=2, **how)
            wait_for_step(path, 2)
            os.kill(run.rank_pids()[0], signal.SIGHUP)
            self.assertEqual(run.wait(), 75, run.tail())
            self.assertTrue(os.path.exists(checkpoint(path, max(steps(path))) + "/COMMIT"), run.tail())
        path = f"{self.dir}/nohup"
        run = Run(tiny(path, 1, 1, 40, **SLOWER),
                  preexec=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        wait_for_step(path, 2)
        os.kill(run.process.pid, signal.SIGHUP)
        self.assertEqual(run.wait(), 0, run.tail())
        self.assertEqual(max(steps(path)), 40)

    def test_a_reader_of_the_lines_that_goes_away(self):
        path = f"{self.dir}/r"
        run = subprocess.Popen([PROGRAM] + tiny(path, 1, 1, 60, **SLOWER), stderr=subprocess.PIPE)
        run.stderr.readline()
        run.stderr.close()
        self.assertEqual(run.wait(LIMIT), 0)
        self.assertEqual(max(steps(path)), 60)
        self.assertTrue(os.path.exists(checkpoint(path, 60) + "/COMMIT"))

    def test_limit_of_file_sizes(self):
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
        code, run = train(tiny(self.dir + "/r"), preexec=limit)
        self.assertEqual(code, 4, run.tail())
        self.assertIn("File too large", run.messages()[-1])

    def test_second_interrupt(self):
        path = self.dir + "/r"
        run = Run(tiny(path, 1, 1, 2000, **SLOWER, train__global_batch=512))
        wait_for_step(path, 1)
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.02)
        run.process.send_signal(signal.SIGINT)
        self.assertEqual(run.wait(5), 130)

    # ---- Ranks that die, stall, throw.

    def survivors_end(self, run, since, limit, named, count):
        """As many ranks end with 7 in time, each with a message that has `named`."""
        wait_for(lambda: run.err().count("ended: 7\n") >= count, limit + 20)
        took = time.monotonic() - since
        self.assertLess(took, limit, run.tail())
        self.assertGreaterEqual(len(run.messages()), count, run.tail())
        for line in run.messages():
            self.assertRegex(line, named)
        for pid in run.rank_pids():  # those that were stopped
            os.kill(pid, signal.SIGKILL)
        run.wait(10)

    def test_dead_rank(self):
        self.need_mpi()
        for ranks, victim in (2, 0), (3, 1):
            path = f"{self.dir}/r{ranks}"
            more = dict(SLOWER, train__micro_batch=1, train__global_batch=12)
            run = Run(tiny(path, ranks, 1, 100000, **more), ranks=ranks, mpi=True)
            wait_for_step(path, 2)
            os.kill(run.rank_pids()[victim], signal.SIGKILL)
            since = time.monotonic()
            self.survivors_end(run, since, 5, f"rank {victim} \\(process [0-9]+\\)", ranks - 1)
            survivor = 1 if victim == 0 else 0
            names = os.listdir(path + "/failures")
            self.assertTrue(any(n.startswith(f"rank{survivor}-") for n in names), names)

    def test_stalled_rank(self):
        self.need_mpi()
        path = self.dir + "/r"
        run = Run(tiny(path, 2, 2, 100000, **SLOWER, guard__comm_timeout_s=1.5), ranks=2, mpi=True)
        wait_for_step(path, 2)
        os.kill(run.rank_pids()[1], signal.SIGSTOP)
        self.survivors_end(run, time.monotonic(), 1.5 + 5, "rank 1", 1)

    def test_watchdog(self):
        self.need_mpi()
        path = self.dir + "/r"
        run = Run(tiny(path, 2, 2, 100000, **SLOWER, guard__watchdog_s=1), ranks=2, mpi=True)
        wait_for_step(path, 2)
        os.kill(run.rank_pids()[1], signal.SIGSTOP)
        self.survivors_end(run, time.monotonic(), 1 + 5, "rank 0: watchdog: no step was completed", 1)
        names = os.listdir(path + "/failures")
        self.assertEqual(len(names), 1, names)
        with open(f"{path}/failures/{names[0]}") as f:
            failure = json.load(f)
        self.assertEqual(failure["kind"], "watchdog")
        self.assertIn(failure["phase"], ("data", "forward", "backward", "optimizer", "report"))
        self.assertGreater(len(failure["stack"]), 3)

    def test_watchdog_of_threads(self):
        path = self.dir + "/r"
        more = dict(SLOWER, train__global_batch=4096, guard__watchdog_s=0.1)
        code, run = train(tiny(path, 2, 2, **more), ranks=2)
        self.assertEqual(code, 7, run.tail())
        self.assertIn("watchdog: no step was completed", run.messages()[-1])
        self.assertEqual(sorted(os.listdir(path + "/failures")),
                         ["rank0-step1.json", "rank1-step1.json"])

    def test_a_pause_is_no_hang(self):
        # Ctrl-Z, or a machine that was paused: longer than the watchdog's limit.
        for how in self.launchers():
            path = f"{self.dir}/r{how['mpi']}"
            run = Run(tiny(path, 2, 2, 200, **SLOWER, guard__watchdog_s=1), ranks=2, **how)
            wait_for_step(path, 2)
            pids = run.rank_pids()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(3)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            self.assertEqual(run.wait(), 0, run.tail())
            self.assertEqual(len(steps(path)), 200)

    def test_one_rank_finds_bad_data(self):
        # While both ranks train, a sample of rank 1 gets an id beyond the vocabulary.
        text = self.dir + "/t.txt"
        with open(text, "w") as f:
            f.write("moiety trains experts. " * 60000)
        subprocess.run([PROGRAM, "prepare", text, "--tokenizer=bytes", f"--out={self.dir}/t", "--quiet"],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for how in self.launchers():
            path = f"{self.dir}/r{how['mpi']}"
            shutil.copy(self.dir + "/t.tok", path + ".tok")
            run = Run(tiny(path, 2, 2, 10000, data__synthetic="none", data__train=path + ".tok",
                           data__shuffle="false"), ranks=2, **how)
            wait_for_step(path, 2)
            with open(path + ".tok", "r+b") as f:
                sample = 8 * (max(steps(path)) + 60) + 5
                f.seek(4096 + 2 * (sample * 16 + 5))
                f.write(struct.pack("<H", 999))
            self.assertEqual(run.wait(), 3, run.tail())
            self.assertEqual(len(run.messages()), 2 if how["mpi"] else 1)
            for line in run.messages():
                self.assertRegex(line, "moiety: rank 1 failed: .*tok.*999")

    # ---- Memory and disk.

    def test_out_of_memory(self):
        more = dict(data__seq_len=512, train__micro_batch=64, train__global_batch=64,
                    model__vocab=4096, memory__loss_chunk=8192, checkpoint__async="false")
        def limited():
            resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))
        code, run = train(tiny(self.dir + "/r", model__d_model=128, **{
            k: v for k, v in more.items()}, model__heads=8) , preexec=limited)
        self.assertEqual(code, 8, run.tail())
        for word in "parameters ", "main_grad ", "activations ", "logits ", "nearest change that fits: ":
            self.assertIn(word, run.messages()[-1])
        change = re.search(r"nearest change that fits: (\S+) = (\S+)", run.messages()[-1])
        code, run = train(tiny(self.dir + "/s", model__d_model=128, model__heads=8, steps=1,
                               **dict(more, **{change[1].replace(".", "__"): change[2]})),
                          preexec=limited)
        self.assertEqual(code, 0, run.tail())

    def test_one_rank_out_of_memory(self):
        self.need_mpi()
        limit = ["sh", "-c", 'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then ulimit -v 600000; fi; exec "$@"',
                 "sh"]
        arguments = tiny(self.dir + "/r", 2, 1, data__seq_len=512, train__micro_batch=32,
                         train__global_batch=64, model__d_model=256, model__heads=8, moe__d_ffn=512)
        code, run = train(arguments, ranks=2, mpi=True, prefix=limit)
        self.assertEqual(code, 8, run.tail())
        self.assertEqual(len(run.messages()), 2, run.tail())
        for line in run.messages():
            self.assertRegex(line, "moiety: rank 1 failed: .*out of memory.*activations ")

    def full_disk(self):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes beyond the limit fail
        resource.setrlimit(resource.RLIMIT_FSIZE, (60000, resource.RLIM_INFINITY))

    def test_full_disk(self):
        path = self.dir + "/r"
        run = Run(tiny(path, 1, 1, 60, **SLOWER, checkpoint__interval=5), preexec=self.full_disk)
        wait_for(lambda: "the checkpoint of step 5 failed and is tried again later" in run.err())
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE,
                         (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.assertEqual(run.wait(), 0, run.tail())
        saved = [e["step"] for e in events(path, "checkpoint")]
        self.assertGreaterEqual(len(saved), 2, saved)
        self.assertNotIn(5, saved)
        self.assertEqual(len(steps(path)), 60)

        code, run = train(tiny(self.dir + "/s", checkpoint__interval=3), preexec=self.full_disk)
        self.assertEqual(code, 4, run.tail())
        self.assertIn("the checkpoint of step 3 failed and is tried again later", run.err())
        self.assertEqual(len(steps(self.dir + "/s")), 6)

    def test_full_disk_names_the_right_checkpoint(self):
        path = self.dir + "/r"
        run = Run(tiny(path, 1, 1, 40, **SLOWER, checkpoint__interval=5, checkpoint__async="false"),
                  preexec=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
        wait_for(lambda: events(path, "checkpoint"))
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (60000, resource.RLIM_INFINITY))
        self.assertEqual(run.wait(), 4, run.tail())
        good = {e["step"] for e in events(path, "checkpoint")}
        failed = [int(s) for s in re.findall(r"the checkpoint of step (\d+) failed", run.err())]
        self.assertTrue(failed)
        self.assertFalse(good & set(failed), run.err())
        self.assertIn("the checkpoint of step 40 failed and is tried again now", run.err())

    # ---- Crashes.

    def test_interrupted_conversions_leave_nothing(self):
        path, folder, out = self.dir + "/r", self.dir + "/hf", self.dir + "/c"
        # Of many tensors, so that there is time for a signal between them.
        code, run = train(tiny(path, 1, 1, 1, moe__experts=64, model__layers=4))
        self.assertEqual(code, 0, run.tail())
        self.assertEqual(Run(["export", path, "--hf", folder]).wait(), 0)
        for command in (["convert", path, "--expert-weights=indexed", "--out", out],
                        ["import", "--hf", folder, "--out", out], ["export", path, "--hf", out]):
            began = time.monotonic()
            self.assertEqual(Run(command).wait(), 0)
            whole = time.monotonic() - began
            shutil.rmtree(out)
            interrupted = 0
            for number in range(20):
                how = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[number % 3]
                run = Run(command)
                time.sleep(whole * number / 20)
                run.process.send_signal(how)
                code = run.wait()
                if os.path.exists(out):
                    if command[-2] == "--out":
                        self.assertEqual(Run(["verify", out]).wait(), 0)
                    self.assertEqual(len(os.listdir(out)), 3)
                    shutil.rmtree(out)
                else:
                    self.assertEqual(code, -how, run.tail())
                    interrupted += 1
                self.assertEqual(sorted(os.listdir(self.dir)), ["hf", "r"])
            self.assertGreater(interrupted, 0)

    def test_kill_at_random_moments(self):
        saves = dict(checkpoint__interval=5, checkpoint__keep_last=2, guard__comm_timeout_s=8)
        whole, run = self.trained("whole", 2, 2, 60, **SLOWER, **saves)
        seconds = time.monotonic() - run.started
        kills = processes = resumed = unfinished = runs = 0
        while kills < KILLS:
            path = f"{self.dir}/r{runs}"
            runs += 1
            code = None
            while code != 0:
                how = random.choice(self.launchers())
                run = Run(tiny(path, 2, 2, 60, **SLOWER, **saves), ranks=2, **how)
                if kills < KILLS:
                    wait_for(lambda: len(run.rank_pids()) == (2 if how["mpi"] else 1)
                             or run.process.poll() is not None)
                    end = time.monotonic() + random.uniform(0, 0.3 * seconds)
                    # Every other kill aims at a save under way.
                    while time.monotonic() < end and not (kills % 2 and saving(path)):
                        time.sleep(0.001)
                    time.sleep(random.uniform(0, 0.01))
                    run.kill_ranks(how["mpi"] and random.randrange(2))
                code = run.wait()
                if code != 0:
                    if not how["mpi"]:
                        self.assertEqual(code, -signal.SIGKILL, run.tail())
                    else:  # 7: the one that was left, 0: it was done, 1: by Open MPI, as it started;
                        # or mpirun ends all by itself
                        codes = set(code) if isinstance(code, list) else {code}
                        self.assertLessEqual(codes, {128 + signal.SIGKILL, 7, 1, 0}, run.tail())
                        wait_for(lambda: not run.rank_pids())
                        processes += 1
                    kills += 1
                    unfinished += saving(path)
                    resumed += bool(checkpoint_names(path, "step-"))
            self.assertEqual(steps(path), steps(whole))
            shutil.rmtree(path)
        print(f"{kills} kills in {runs} runs, {processes} of processes, {resumed} with a checkpoint "
              f"to go on from, {unfinished} in the middle of a save", file=sys.stderr)


def main():
    global PROGRAM, KILLS
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=None)
    options, rest = parser.parse_known_args()
    PROGRAM, KILLS = os.path.abspath(options.program), options.kills
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    random.seed(seed)
    unittest.main(argv=["faults.py"] + rest)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What happens to `moiety train` when something goes wrong: signals, kills, stalls, full disks, short
memory, values that are not finite; with ranks as threads, as processes that the program starts, and as
processes of mpirun.

    faults.py PROGRAM [--kills N] [--seed S] [unittest arguments, such as Faults.test_dead_rank -v]

Standard library alone. The cases of mpirun are skipped where there is no mpirun, or the program
finds no MPI. --kills N: kill -9 at N random moments (default 6; 200 is the long form).
"""
import argparse
import itertools
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

import runs
from poke import poke
from runs import (LIMIT, SLOWER, Run, checkpoint, checkpoint_names, events, has_mpi, records, saving,
                  state, steps, tiny, train, wait_for, wait_for_step)

KILLS = 6


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
        """All ways of running ranks, as keyword arguments of Run."""
        return [{}] + self.process_launchers()

    def process_launchers(self):
        return [dict(own=True)] + ([dict(mpi=True)] if self.mpi else [])

    def need_mpi(self):
        if not self.mpi:
            self.skipTest("no MPI")

    def trained(self, name, ranks=1, ep=1, steps=6, mpi=False, own=False, **more):
        path = f"{self.dir}/{name}"
        code, run = train(tiny(path, ranks, ep, steps, **more), ranks=ranks, mpi=mpi, own=own)
        self.assertEqual(code, 0, run.tail())
        return path, run

    # ---- Threads and processes are the same.

    def test_processes_equal_threads(self):
        for how, (ranks, ep) in itertools.product(self.process_launchers(), ((2, 1), (2, 2), (4, 2))):
            more = dict(precision__recipe="bf16", optim__state_dtype="bf16", router__bias_rate=0.01)
            case = f"{ranks}{ep}{''.join(how)}"
            threads, run_t = self.trained(f"t{case}", ranks, ep, **more)
            processes, run_p = self.trained(f"p{case}", ranks, ep, **how, **more)
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
        whole, _ = self.trained("whole", 2, 2, checkpoint__interval=3, checkpoint__keep_last=10)
        for how, (name, ranks, ep, same) in itertools.product(
                self.process_launchers(), (("same", 2, 2, True), ("other", 4, 2, False))):
            path = f"{self.dir}/{name}{''.join(how)}"
            shutil.copytree(checkpoint(whole, 3), checkpoint(path, 3))
            code, run = train(tiny(path, ranks, ep), ranks=ranks, **how)
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
            path, run = self.trained(f"auto{''.join(how)}", 4, 4, 12, **how, **more)
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
            code, run = train(tiny(self.dir + "/t", 2) + ["--run.launch=threads"], ranks=2, mpi=True)
            self.assertEqual(code, 2, run.tail())
            self.assertIn('run.launch = "threads" (command line), but OMPI_COMM_WORLD_SIZE = 2: ',
                          run.err())

    def test_processes_of_the_program(self):
        # What is wrong is said once, with its code; what a process must not be told is refused.
        code, run = train(tiny(self.dir + "/r", 2, optim__lr="fast"), ranks=2, own=True)
        self.assertEqual((code, len(run.messages())), (2, 1), run.tail())
        code, run = train(tiny(self.dir + "/r", 3, 2, train__micro_batch=1, train__global_batch=3),
                          ranks=3, own=True)
        self.assertEqual((code, len(run.messages())), (2, 1), run.tail())
        self.assertIn("run.ranks = 3: must be a multiple of parallel.ep", run.messages()[0])
        for value in "0/2:3:", "0/2:250:-1,251,", "rubbish":
            code, run = train(tiny(self.dir + "/r"), env={"MOIETY_STARTED_RANK": value})
            self.assertEqual(code, 2, run.tail())
            self.assertIn(f"moiety: MOIETY_STARTED_RANK = {value}: ", run.messages()[-1])
        self.assertFalse(os.path.exists(self.dir + "/r"))
        code, run = train(tiny(self.dir + "/s", 2) + ["--print-config"], ranks=2, own=True)
        self.assertEqual(code, 0, run.tail())
        # The ranks' own logs are not the parent's: one console.
        code, run = train(tiny(self.dir + "/s", 2), ranks=2, own=True)
        self.assertEqual(code, 0, run.tail())
        self.assertEqual(sum(l.startswith("step 6/6 ") for l in run.err().splitlines()), 1)

    def test_parent_of_processes(self):
        # Signals come to the ranks through it, and they die with it.
        for sent in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
            path = f"{self.dir}/r{sent}"
            run = Run(tiny(path, 2, 2, 4000, **SLOWER), ranks=2, own=True)
            wait_for_step(path, 2)
            self.assertEqual(len(run.rank_pids()), 2)
            run.process.send_signal(sent)
            self.assertEqual(run.wait(), 75, run.tail())
            self.assertTrue(os.path.exists(checkpoint(path, max(steps(path))) + "/COMMIT"), run.tail())
        path = self.dir + "/u"
        run = Run(tiny(path, 2, 2, 4000, **SLOWER), ranks=2, own=True)
        wait_for_step(path, 2)
        run.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: events(path, "checkpoint"))
        # Ctrl-Z stops all of them, and they go on.
        run.process.send_signal(signal.SIGTSTP)
        wait_for(lambda: all(state(pid) == "T" for pid in run.rank_pids() + [run.process.pid]))
        run.process.send_signal(signal.SIGCONT)
        now = max(steps(path))
        wait_for_step(path, now + 2)
        pids = run.rank_pids()
        run.process.kill()
        run.process.wait()
        wait_for(lambda: all(state(pid) in "ZX" for pid in pids), 2)

    def test_ranks_that_differ(self):
        # tests/apps_mpi goes over every key; here are the ways from a launch to the comparison.
        self.need_mpi()
        for path in "t", "u":
            with open(f"{self.dir}/{path}.txt", "w") as f:
                f.write(f"moiety trains {path} experts. " * 500)
            subprocess.run([runs.PROGRAM, "prepare", f"{self.dir}/{path}.txt", "--tokenizer=bytes",
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
                copy = f"{self.dir}/{guard}{''.join(how)}"
                shutil.copytree(path, copy)
                code, run = train(tiny(copy, 2, 2, 20, guard__nan=guard), ranks=2, **how)
                self.assertEqual(code, 6, run.tail())
                for line in run.messages():
                    self.assertIn("layer 1, expert 3: weight layers.1.moe.experts.fc2.weight is nan "
                                  "at [3, 5, 7]", line)
                self.assertEqual(len(run.messages()), 2 if "mpi" in how else 1)
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
            path = f"{self.dir}/stopped{''.join(how)}"
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
            path = f"{self.dir}/r{''.join(how)}"
            run = Run(tiny(path, 2, 2, 40, **SLOWER), ranks=2, **how)
            wait_for_step(path, 2)
            os.kill(run.rank_pids()[-1], signal.SIGUSR1)
            self.assertEqual(run.wait(), 0, run.tail())
            saved = [e["step"] for e in events(path, "checkpoint")]
            self.assertEqual(len(saved), 2, saved)
            self.assertLess(saved[0], 40)

    def test_hangup_saves_unless_it_is_ignored(self):
        for how in self.launchers():
            path = f"{self.dir}/r{''.join(how)}"
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
        run = subprocess.Popen([runs.PROGRAM] + tiny(path, 1, 1, 60, **SLOWER), stderr=subprocess.PIPE)
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
        """As many ranks end with 7 in time, each with a message that has `named`; of own processes the
        program, with one message."""
        if run.own:
            self.assertEqual(run.wait(limit + 20), 7, run.tail())
            self.assertLess(time.monotonic() - since, limit, run.tail())
            self.assertRegex(run.messages()[-1], named)
            self.assertEqual(run.rank_pids(), [])
            return
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
        for how, (ranks, victim) in itertools.product(self.process_launchers(), ((2, 0), (3, 1))):
            path = f"{self.dir}/r{ranks}{''.join(how)}"
            more = dict(SLOWER, train__micro_batch=1, train__global_batch=12)
            run = Run(tiny(path, ranks, 1, 100000, **more), ranks=ranks, **how)
            wait_for_step(path, 2)
            os.kill(run.rank_pids()[victim], signal.SIGKILL)
            since = time.monotonic()
            named = f"rank {victim} \\(process [0-9]+\\)"
            if run.own:
                named = f"^moiety: rank {victim} \\(pid [0-9]+\\) is gone \\(signal 9, Killed\\); rank .*" + named
            self.survivors_end(run, since, 5, named, ranks - 1)
            survivor = 1 if victim == 0 else 0
            names = os.listdir(path + "/failures")
            self.assertTrue(any(n.startswith(f"rank{survivor}-") for n in names), names)

    def test_stalled_rank(self):
        for how in self.process_launchers():
            path = f"{self.dir}/r{''.join(how)}"
            run = Run(tiny(path, 2, 2, 100000, **SLOWER, guard__comm_timeout_s=1.5), ranks=2, **how)
            wait_for_step(path, 2)
            os.kill(run.rank_pids()[1], signal.SIGSTOP)
            self.survivors_end(run, time.monotonic(), 1.5 + 5, "rank 1", 1)

    def test_watchdog(self):
        for how in self.process_launchers():
            self.watchdog_of(f"{self.dir}/r{''.join(how)}", how)

    def watchdog_of(self, path, how):
        run = Run(tiny(path, 2, 2, 100000, **SLOWER, guard__watchdog_s=1), ranks=2, **how)
        wait_for_step(path, 2)
        os.kill(run.rank_pids()[1], signal.SIGSTOP)
        if run.own:  # the rank says it itself, and the parent how it has ended
            self.survivors_end(run, time.monotonic(), 1 + 5, "rank 0 .* has ended with exit code 7", 1)
            self.assertIn("rank 0: watchdog: no step was completed", run.messages()[0])
        else:
            self.survivors_end(run, time.monotonic(), 1 + 5,
                               "rank 0: watchdog: no step was completed", 1)
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
            path = f"{self.dir}/r{''.join(how)}"
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
        subprocess.run([runs.PROGRAM, "prepare", text, "--tokenizer=bytes", f"--out={self.dir}/t", "--quiet"],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for how in self.launchers():
            path = f"{self.dir}/r{''.join(how)}"
            shutil.copy(self.dir + "/t.tok", path + ".tok")
            run = Run(tiny(path, 2, 2, 10000, data__synthetic="none", data__train=path + ".tok",
                           data__shuffle="false"), ranks=2, **how)
            wait_for_step(path, 2)
            with open(path + ".tok", "r+b") as f:
                sample = 8 * (max(steps(path)) + 60) + 5
                f.seek(4096 + 2 * (sample * 16 + 5))
                f.write(struct.pack("<H", 999))
            self.assertEqual(run.wait(), 3, run.tail())
            self.assertEqual(len(run.messages()), 2 if "mpi" in how else 1)
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
                    wait_for(lambda: len(run.rank_pids()) == (2 if how else 1)
                             or run.process.poll() is not None)
                    end = time.monotonic() + random.uniform(0, 0.3 * seconds)
                    # Every other kill aims at a save under way.
                    while time.monotonic() < end and not (kills % 2 and saving(path)):
                        time.sleep(0.001)
                    time.sleep(random.uniform(0, 0.01))
                    run.kill_ranks(how and random.randrange(2))
                code = run.wait()
                if code != 0:
                    if not how:
                        self.assertEqual(code, -signal.SIGKILL, run.tail())
                    elif "own" in how:
                        self.assertEqual(code, 7, run.tail())
                        self.assertEqual(run.rank_pids(), [])
                        processes += 1
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
    global KILLS
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=None)
    options, rest = parser.parse_known_args()
    runs.PROGRAM, KILLS = os.path.abspath(options.program), options.kills
    seed = random.randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    random.seed(seed)
    unittest.main(argv=["faults.py"] + rest)


if __name__ == "__main__":
    main()

"""Runs of `moiety train` as tests start them, and what they leave: their arguments, processes, exit
codes and records. `PROGRAM` is set by who imports this."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PROGRAM = ""
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
    """A run under way: `ranks` threads of one process, or processes, started by the program (`own`) or
    under mpirun."""

    def __init__(self, arguments, ranks=1, mpi=False, own=False, prefix=(), env=None, preexec=None,
                 last=()):
        """`last` are arguments that the last process has besides, under mpirun."""
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
            command += [f"--ranks={ranks}", "--run.launch=" + ("processes" if own else "threads")]
        self.mark = f"MOIETY_TEST_RUN={os.urandom(8).hex()}"
        name, value = self.mark.split("=")
        environment = dict(os.environ, **(env or {}), **{name: value})
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=self.err_file,
                                        env=environment, preexec_fn=preexec)
        self.mpi, self.own, self.ranks = mpi, own and ranks > 1, ranks

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
        if not self.mpi and not self.own:
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
            name = "MOIETY_STARTED_RANK" if self.own else "OMPI_COMM_WORLD_RANK"
            rank = re.search(name + r"=(\d+)", environment)
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


def state(pid):
    """Of a process: "R", "S", "T", "Z"; "X" if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def has_mpi():
    if not shutil.which("mpirun"):
        return False
    with tempfile.TemporaryDirectory() as d:
        code, run = train(tiny(d + "/r", 2, steps=1), ranks=2, mpi=True)
        if code != 0:
            print("no MPI: " + run.err().strip(), file=sys.stderr)
        return code == 0

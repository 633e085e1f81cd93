#!/usr/bin/env python3
"""The examples of docs/clusters.md, as far as they run without a cluster: the scripts for Slurm with an
`srun` that stands for Slurm's own, and what the container files say against the build.

    cluster_examples.py PROGRAM [unittest arguments]

The stand-in starts the ranks by mpirun and shows them Slurm's variables, not Open MPI's. Without
mpirun it says so and ends with 77.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import runs

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
FOLDER = os.path.join(ROOT, "examples", "cluster")

# What `srun` is given here must be its own options, as Slurm 23 has them.
SRUN = """#!/usr/bin/env python3
import os, sys
words = sys.argv[1:]
while words and words[0].startswith("-"):
    option = words.pop(0)
    if option not in ("--mpi=pmix", "--kill-on-bad-exit=0"):
        sys.exit(f"srun: unrecognized option '{option}'")
tasks = os.environ["SLURM_NTASKS"]
hide = [w for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE") for w in ("-u", name)]
seen = ["env", *hide, f"SLURM_STEP_NUM_TASKS={tasks}", f"SLURM_STEP_TASKS_PER_NODE={tasks}"]
tell = ["sh", "-c", '"$@"; echo "ended: $?" >> "$0"', os.environ["FAKE_SRUN_CODES"]]
os.execvp("mpirun", ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", tasks,
                     *seen, *tell, *words])
"""

# Of sbatch; those of a job script that is read here.
DIRECTIVES = re.compile(r"--(job-name|nodes|ntasks-per-node|cpus-per-task|gpus-per-node|time|signal)=\S+$")


class ClusterExamples(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="moiety-cluster-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        os.makedirs(f"{self.dir}/bin")
        with open(f"{self.dir}/bin/srun", "w") as f:
            f.write(SRUN)
        os.chmod(f"{self.dir}/bin/srun", 0o755)
        os.symlink(os.path.join(ROOT, "configs"), f"{self.dir}/configs")
        for build in ("cpu", "gpu"):
            os.makedirs(f"{self.dir}/build/{build}/bin")
            os.symlink(runs.PROGRAM, f"{self.dir}/build/{build}/bin/moiety")

    def start(self, script, *more):
        """The job, on two tasks of one node; its run directory is runs/cluster."""
        self.codes = f"{self.dir}/codes"
        environment = dict(os.environ, PATH=f"{self.dir}/bin:" + os.environ["PATH"], SLURM_NTASKS="2",
                           SLURM_SUBMIT_DIR=self.dir, FAKE_SRUN_CODES=self.codes)
        tiny = [word for word in runs.tiny("x", 2)[1:] if not word.startswith("--run.dir")]
        return subprocess.Popen(["bash", os.path.join(FOLDER, script), *tiny, *more], cwd="/", text=True,
                                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def ends(self, job):
        """The exit codes of the ranks, and what the job said."""
        out = job.communicate(timeout=runs.LIMIT)[0]
        with open(self.codes) as f:
            codes = [int(code) for code in re.findall(r"ended: (\d+)", f.read())]
        os.unlink(self.codes)
        return codes, out

    def steps(self):
        return sorted(runs.steps(f"{self.dir}/runs/cluster"))

    def test_jobs_train_save_and_go_on(self):
        for script in ("train.slurm", "train_gpus.slurm"):
            shutil.rmtree(f"{self.dir}/runs", ignore_errors=True)
            here = "--run.device=cpu"  # the script for GPUs has its own before it: the last one counts
            codes, out = self.ends(self.start(script, here, "--train.steps=4"))
            self.assertEqual(codes, [0, 0], f"{script}: {out}")
            self.assertEqual(self.steps(), [1, 2, 3, 4], out)
            codes, out = self.ends(self.start(script, here, "--train.steps=6"))
            self.assertEqual(codes, [0, 0], f"{script}: {out}")
            self.assertEqual(self.steps(), [1, 2, 3, 4, 5, 6], out)

    def test_the_signal_before_the_end_saves(self):
        job = self.start("train.slurm", "--train.steps=1000000")
        runs.wait_for(lambda: len(self.steps()) > 5)
        # Slurm signals the processes of its steps, not the script.
        for pid in ranks_of(self.dir):
            os.kill(pid, signal.SIGTERM)
        codes, out = self.ends(job)
        self.assertEqual(codes, [75, 75], out)
        self.assertTrue(os.listdir(f"{self.dir}/runs/cluster/checkpoints"), out)

    def test_scripts_ask_slurm_for_what_it_knows(self):
        for script in ("train.slurm", "train_gpus.slurm"):
            path = os.path.join(FOLDER, script)
            subprocess.run(["bash", "-n", path], check=True)
            with open(path) as f:
                asked = [line.split(None, 1)[1] for line in f.read().splitlines()
                         if line.startswith("#SBATCH")]
            self.assertTrue(asked)
            for option in asked:
                self.assertRegex(option, DIRECTIVES, script)

    def test_container_files_hold_together(self):
        """Known instructions, stages and presets that there are, commands that a shell can read."""
        with open(f"{ROOT}/CMakePresets.json") as f:
            presets = f.read()
        known = {"FROM", "COPY", "WORKDIR", "RUN", "ENV", "ENTRYPOINT", "ARG", "USER"}
        for name in ("Dockerfile", "Dockerfile.gpu"):
            with open(os.path.join(FOLDER, name)) as f:
                text = re.sub(r"^\s*#.*\n", "", f.read(), flags=re.M).replace("\\\n", " ")
            stages = set()
            for line in filter(None, map(str.strip, text.splitlines())):
                word, rest = line.split(None, 1)
                self.assertIn(word, known, f"{name}: {line}")
                if word == "FROM" and " AS " in rest:
                    stages.add(rest.split(" AS ")[1].strip())
                if word == "COPY" and rest.startswith("--from="):
                    self.assertIn(rest.split()[0][len("--from="):], stages, f"{name}: {line}")
                if word == "RUN":
                    subprocess.run(["sh", "-n", "-c", rest], check=True)
                    for preset in re.findall(r"cmake --preset (\S+)", rest):
                        self.assertIn(f'"name": "{preset}"', presets, line)


def ranks_of(folder):
    """The processes that run the program from this folder's build."""
    out = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/environ", "rb") as f:
                if f"FAKE_SRUN_CODES={folder}/".encode() not in f.read():
                    continue
            if os.path.realpath(f"/proc/{entry}/exe") == runs.PROGRAM:
                out.append(int(entry))
        except (OSError, ValueError):
            continue
    return out


def main():
    runs.PROGRAM = os.path.realpath(sys.argv[1])
    if not shutil.which("mpirun"):
        print("there is no mpirun")
        sys.exit(77)
    unittest.main(argv=["cluster_examples.py"] + sys.argv[2:])


if __name__ == "__main__":
    main()

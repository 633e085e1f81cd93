#!/usr/bin/env python3
"""Ranks on two hosts: two network namespaces of this machine, with names and /dev/shm of their own,
between which mpirun starts ranks and no memory can be mapped.

    two_hosts.py PROGRAM [unittest arguments]

Needs mpirun, `ip` and `unshare`, and the right to make namespaces (root); without them it says so and
ends with 77. Where there are two GPUs, each host sees one, and NCCL carries what GPU ranks send.
"""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import runs

# What mpirun calls in place of ssh: AGENT [OPTIONS] ADDRESS COMMAND...
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=${1##*.}
shift
exec FOLDER/enter "$host" "$*"
"""
ENTER = """#!/bin/sh
exec ip netns exec "PREFIX$1" unshare --uts --ipc --mount sh -c '
hostname "host$0"; mount -t tmpfs none /dev/shm
[ -d FOLDER/own ] && mount -t tmpfs none FOLDER/own
mkdir -p "FOLDER/tmp$0"; TMPDIR="FOLDER/tmp$0"; export TMPDIR
[ -f FOLDER/gpu$0 ] && { CUDA_VISIBLE_DEVICES=$(cat FOLDER/gpu$0); export CUDA_VISIBLE_DEVICES; }
eval "$1"' "$1" "$2"
"""


class Hosts:
    """Two hosts with the addresses 10.99.0.1 and 10.99.0.2, until close()."""

    def __init__(self, folder):
        self.folder, self.prefix = folder, f"moiety{os.getpid()}-"
        self.link = [f"mo{os.getpid() % 10**6}{end}" for end in "ab"]
        try:
            self.make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            said = getattr(error, "stderr", None)
            raise OSError((said or str(error)).strip()) from error
        for name, text in (("agent", AGENT), ("enter", ENTER)):
            with open(f"{folder}/{name}", "w") as f:
                f.write(text.replace("FOLDER", folder).replace("PREFIX", self.prefix))
            os.chmod(f"{folder}/{name}", 0o755)

    def ip(self, *words):
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    def make(self):
        for host in "12":
            self.ip("netns", "add", self.prefix + host)
        a, b = self.link
        self.ip("link", "add", a, "netns", self.prefix + "1", "type", "veth", "peer", "name", b,
                "netns", self.prefix + "2")
        for host, end in zip("12", self.link):
            inside = ["-n", self.prefix + host]
            self.ip(*inside, "addr", "add", f"10.99.0.{host}/24", "dev", end)
            self.ip(*inside, "link", "set", end, "up")
            self.ip(*inside, "link", "set", "lo", "up")

    def close(self):
        for host in "12":
            subprocess.run(["ip", "netns", "del", self.prefix + host], capture_output=True)

    def mpirun(self, ranks, arguments):
        """Exit code and output of the program, its ranks divided evenly."""
        hosts = ",".join(f"10.99.0.{host}:{ranks // 2}" for host in "12")
        here = "--mca btl_tcp_if_include 10.99.0.0/24 --mca oob_tcp_if_include 10.99.0.0/24"
        command = (f"mpirun --allow-run-as-root --oversubscribe --bind-to none -np {ranks} --host {hosts} "
                   f"--mca plm rsh --mca plm_rsh_agent {self.folder}/agent {here} "
                   + " ".join(f"'{word}'" for word in [runs.PROGRAM] + arguments))
        done = subprocess.run([f"{self.folder}/enter", "1", command], capture_output=True, text=True,
                              timeout=120)
        return done.returncode, done.stdout + done.stderr


def gpus():
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this process may use."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return []
    return [str(i) for i, line in enumerate(said.stdout.splitlines()) if line.startswith("GPU ")]


def reason_to_skip():
    for program in ("mpirun", "ip", "unshare"):
        if not shutil.which(program):
            return f"there is no {program}"
    if not runs.has_mpi():
        return "the program finds no MPI"
    with tempfile.TemporaryDirectory() as folder:
        try:
            Hosts(folder).close()
        except OSError as error:
            return f"no network namespaces: {error}"
    return None


class TwoHosts(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="moiety-hosts-")
        self.addCleanup(shutil.rmtree, self.dir, ignore_errors=True)
        self.hosts = Hosts(self.dir)
        self.addCleanup(self.hosts.close)

    def check(self, **layout):
        """Four ranks, two on each host, against four threads."""
        def arguments(name):
            return runs.tiny(f"{self.dir}/{name}", ranks=4, steps=5, **layout)

        code, run = runs.train(arguments("one"), ranks=4)
        self.assertEqual(code, 0, run.tail())
        code, said = self.hosts.mpirun(4, arguments("two"))
        self.assertEqual(code, 0, said)
        self.assertIn("their network namespaces differ", said)
        self.assertEqual(runs.steps(f"{self.dir}/two"), runs.steps(f"{self.dir}/one"))
        self.assertEqual(len(runs.steps(f"{self.dir}/two")), 5)

    def test_experts_between_hosts(self):
        self.check(ep=4)

    def test_experts_on_a_host_and_data_between_hosts(self):
        self.check(ep=2)

    def test_slices_between_hosts(self):
        self.check(ep=2, parallel__tp=2, parallel__gtp=2)

    def check_gpus(self, **more):
        """Two ranks, each with a GPU on a host of its own, which they take by themselves, against two that
        map each other's memory."""
        for host, gpu in zip("12", gpus()):
            with open(f"{self.dir}/gpu{host}", "w") as f:
                f.write(gpu)

        def arguments(name, **which):
            return runs.tiny(f"{self.dir}/{name}", ranks=2, steps=8, **more, **which)

        code, run = runs.train(arguments("one", comm__transport="mapped", run__device="cuda"), ranks=2,
                               own=True)
        self.assertEqual(code, 0, run.tail())
        code, said = self.hosts.mpirun(2, arguments("two"))
        self.assertEqual(code, 0, said)
        self.assertIn("works over NCCL", said)
        self.assertIn("their network namespaces differ", said)
        self.assertEqual(runs.steps(f"{self.dir}/two"), runs.steps(f"{self.dir}/one"))
        self.assertEqual(len(runs.steps(f"{self.dir}/two")), 8)


    @unittest.skipIf(len(gpus()) < 2, "needs two GPUs")
    def test_data_between_gpus_of_two_hosts(self):
        self.check_gpus()

    @unittest.skipIf(len(gpus()) < 2, "needs two GPUs")
    def test_slices_between_gpus_of_two_hosts(self):
        self.check_gpus(parallel__tp=2, precision__recipe="bf16")

    @unittest.skipIf(len(gpus()) < 2, "needs two GPUs")
    def test_gpus_of_two_hosts_that_may_not_use_nccl(self):
        for host, gpu in zip("12", gpus()):
            with open(f"{self.dir}/gpu{host}", "w") as f:
                f.write(gpu)
        code, said = self.hosts.mpirun(2, runs.tiny(f"{self.dir}/run", ranks=2, steps=3,
                                                    run__device="cuda", comm__transport="mapped"))
        self.assertEqual(code, 2, said)
        self.assertIn("their network namespaces differ", said)

    def test_a_run_directory_that_is_not_shared_is_named(self):
        os.mkdir(f"{self.dir}/own")
        code, said = self.hosts.mpirun(2, runs.tiny(f"{self.dir}/own/run", ranks=2, steps=3))
        self.assertEqual(code, 4, said)
        self.assertIn(f"rank 1: {self.dir}/own/run is not the directory that rank 0 sees there", said)


if __name__ == "__main__":
    runs.PROGRAM = os.path.abspath(sys.argv[1])
    why = reason_to_skip()
    if why:
        print(f"two_hosts.py: skipped: {why}")
        sys.exit(77)
    unittest.main(argv=[sys.argv[0]] + sys.argv[2:])

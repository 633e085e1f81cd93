#!/usr/bin/env python3
"""Bad inputs for every command, made from the program's own table of keys and options.

    bad_inputs.py PROGRAM [--every N] [--mpi]

Every key of the configuration gets every hostile value of its type, every option of every command
likewise, and every file a command reads or writes is replaced by what is no such file. Each case
must end with a documented exit code, within two seconds of computing and without waiting, leave
nothing behind, and say on its last line, alone and without control characters, which key, option or
file it is about, and its value. --every N runs each N-th case: a sample. --mpi starts the trainings among the cases as two processes
of mpirun, of which each must end like that; without mpirun it ends with 77. Standard library alone.
"""
import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time

PROGRAM = ""
CODES = {0, 2, 3, 4, 5, 8, 9}  # what a bad input may end with; 1, 6, 7 and signals are faults
COMPUTING = 2.0                # seconds of a processor
MEMORY = 1 << 30
WAITING = 20.0                 # seconds of a clock, on a machine with other things to do

HUGE = "9" * 20
LONG = "x" * 5000
# Values that no number has, and numbers that some keys have.
NO_NUMBERS = ["", " ", "ten", "0x", "1_", "+-1", "1e999", "nan", "inf", "-inf", HUGE, "-" + HUGE, "1 2", "true",
              '"1"', "[1]", "{a = 1}", "1\n2", "\x1b[31m", "1;rm", "--", LONG]
BIG_NUMBERS = ["-1", "9223372036854775807", "-9223372036854775808", "4611686018427387904", "1000000000000"]
NO_WORDS = ["", " ", "nonsense", "NONE", "none ", "[1]", "{a = 1}", "\x1b[31m", "a\nb", LONG]
HOSTILE = {  # by type; all of them are refused, but for texts that may be paths
    "true or false": ["", "yes", "1", "TRUE", '"true"', "[true]", "nan", HUGE, "true\nfalse", LONG],
    "an integer": NO_NUMBERS + ["1.5", "1.0", "1e3"],
    "a number": NO_NUMBERS,
    "a string": ["[1]", "[[]]", "{a = 1}", '"a\\nb"', '"\\u0001"', "a\nb", "\x1b[31m", "\udcff"],
    "one of": NO_WORDS,
    "a list of integers": ["", "1", "[1.5]", '["a"]', "[[1]]", "[-1]", f"[{HUGE}]", "[nan]", "{a = 1}", "[1",
                           "[" * 300 + "]" * 300],
    "a list of paths": ["[1]", "[true]", '{path = "a"}', '["a\\nb"]', '[["a"]]', "[nan]"],
    "a list of paths or {path, weight}": [
        "[1]", '[{path = 1}]', '[{path = "a", weight = 0}]', '[{path = "a", weight = nan}]',
        '[{path = "a", weight = 1e308}, {path = "b", weight = 1e308}]', "[{weight = 1}]",
        '{path = "a", path = "b", x = 1}'],
}
TEXTS = {  # config files that are damaged
    "deep.toml": "[" + ".".join(["a"] * 50000) + "]\n", "long.toml": "a" * 1000000,
    "dots.toml": "[model]\n" + ".".join(["a"] * 1000) + " = 1\n",
    "quoted.toml": "'a='" + ".'a='" * 50000 + " = 1\n", "nested.toml": "[model]\nlayers = " + "[" * 5000,
    "tables.toml": "x = " + "{a = " * 5000, "nul.toml": "[model]\n\x00", "latin.toml": "[model]\n# \udcff\n",
    "key.toml": "[model]\n" + "k" * 100000 + " = 1\n", "section.toml": "[" + "s" * 100000 + "]\nx = 1\n",
    "bom.toml": "\ufeff[model]\nlayers = 0\n", "cr.toml": "[model]\rlayers = 2\r",
    "twice.toml": "[model]\nlayers = 1\nlayers = 2\n", "value.toml": '[run]\ndir = "' + "d" * 100000,
    "text.toml": "layers\n", "list.toml": "[[model]]\nlayers = 1\n",
}
JSON_LINES = ['{"text": 1}', '{"text"', '{"text": "a", "text": "b"}', "[]", '{"no": "text"}', '{"text": 1e999}',
              "\xff", '{"text": "\\ud800"}', "{" * 10000, '{"text": "a"} x']
# Files that are none of those that a command reads; a FIFO would be waited for.
NO_FILES = ["missing", "directory", "fifo", "empty", "garbage", "loop", "/dev/null", "/dev/zero"]
# Of an error about several keys, or about memory.
ANY_KEY = ["run.", "model.", "moe.", "router.", "data.", "train.", "optim.", "parallel.", "memory", "precision.",
           "checkpoint.", "eval."]


class Case:
    def __init__(self, arguments, names, code=None, stdin=b"", stdout=subprocess.DEVNULL):
        """`names`: texts of which the last line has at least one; `code`: the only right ones."""
        self.arguments, self.names, self.code = arguments, names, code
        self.stdin, self.stdout = stdin, stdout


def visible(value):
    """The beginning of a value as messages show it."""
    return re.sub("[\x00-\x1f\x7f]", lambda m: {"\n": "\\n", "\t": "\\t"}.get(
        m[0], "\\x%02x" % ord(m[0])), value)[:20]


def visible_argument(argument):
    return repr(argument) if len(argument) < 100 else repr(argument[:60]) + f"...{len(argument)}"


def limit():
    """Of a case: memory, so that large models are refused, and time."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(COMPUTING) + 8, int(COMPUTING) + 9))


def start(case, directory):
    return subprocess.Popen(
        [PROGRAM] + case.arguments, cwd=directory, stdin=subprocess.PIPE, stdout=case.stdout,
        stderr=subprocess.PIPE, preexec_fn=limit)


def run(case, directory):
    """The exit code, stderr, and the seconds that it computed and took."""
    process = start(case, directory)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        _, err = process.communicate(case.stdin, WAITING)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        _, err = process.communicate()
        code = "did not end"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return code, err.decode(errors="replace"), computed, time.monotonic() - began


def tree(directory):
    found = set()
    for folder, folders, files in os.walk(directory):
        found.update(os.path.relpath(os.path.join(folder, name), directory) for name in folders + files)
    return found


# Runs a command with stderr and the exit code in files of the rank's own.
OF_RANK = 'exec 2>"$0/err.$OMPI_COMM_WORLD_RANK"; "$@"; echo $? >"$0/code.$OMPI_COMM_WORLD_RANK"'
MPIRUN = ["mpirun", "--enable-recovery", "--allow-run-as-root", "--oversubscribe", "-np", "2"]


def can_be_of_mpirun(case):
    """Trainings that are refused, by arguments that mpirun can pass on."""
    return (case.arguments[:1] == ["train"] and "--print-config" not in case.arguments and 0 not in (case.code or CODES)
            and case.stdout == subprocess.DEVNULL and all(len(a) < 1000 and a.isprintable() for a in case.arguments))


def run_ranks(case, directory):
    """The exit code and stderr of each of two processes."""
    told = tempfile.mkdtemp(prefix="moiety-ranks-")

    def read(name):
        path = os.path.join(told, name)
        if not os.path.exists(path):
            return ""
        with open(path, errors="replace") as f:
            return f.read()
    process = subprocess.Popen(MPIRUN + ["sh", "-c", OF_RANK, told, PROGRAM] + case.arguments, cwd=directory,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + WAITING
    # mpirun itself now and then stays behind; what counts is that the ranks have ended.
    while process.poll() is None and time.monotonic() < end:
        if all(read(f"code.{rank}").endswith("\n") for rank in (0, 1)):
            end = min(end, time.monotonic() + 1)
        time.sleep(0.01)
    if process.poll() is None:
        process.kill()
        process.wait()
    ranks = [(read(f"code.{rank}").strip(), read(f"err.{rank}")) for rank in (0, 1)]
    shutil.rmtree(told)
    return [(int(code) if code else "did not end", err) for code, err in ranks]


def faults_of_ranks(case, directory):
    before = tree(directory)
    ranks = run_ranks(case, directory)
    left = clear(directory, before)
    out = [fault for code, err in ranks for fault in judge(case, code, err, left)]
    if ranks[0][0] != ranks[1][0]:
        out.append(f"the ranks end with {ranks[0][0]} and {ranks[1][0]}")
    return out


def faults(case, directory):
    before = tree(directory)
    code, err, computed, _ = run(case, directory)
    out = judge(case, code, err, clear(directory, before))
    if computed > COMPUTING:
        out.append(f"computed {computed:.1f} s")
    return out


def clear(directory, before):
    """Removes what was not there before, and says what that was."""
    left = tree(directory) - before
    for name in sorted(left, key=len, reverse=True):
        path = os.path.join(directory, name)
        os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
    return left


def judge(case, code, err, left):
    """What is wrong with the end of a process."""
    lines = err.split("\n")[:-1]
    last = lines[-1] if lines else ""
    errors = [line for line in lines if line.startswith("moiety: ")]
    out = []
    if code not in (case.code or CODES):
        out.append(f"exit code {code}, expected {sorted(case.code or CODES)}")
    if code != 0:
        if not last.startswith("moiety: ") or len(errors) != 1 or not err.endswith("\n"):
            out.append("the last line is not the error, or not the only one")
        if not any(name in last for name in case.names):
            out.append(f"the last line names none of {case.names}")
        if len(last) > 5000:
            out.append(f"the last line has {len(last)} characters")
        if left:
            out.append(f"left behind: {sorted(left)}")
    if re.search("[\x00-\x08\x0b-\x1f\x7f]", err):
        out.append("control characters on stderr")
    return [f"{fault}\n    {last[:300]}" for fault in out]


def ask(*arguments):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, check=False)


def keys():
    """name -> (type, range) of every key, as the program says them when it refuses a value."""
    table = {}
    for name in re.findall(r"^  --(\w+\.\w+)=", ask("train", "--help").stdout, re.M):
        said = ask("train", f"--{name}=[[1]]", "--print-config").stderr
        found = re.search(r"must be (true or false|an integer|a number|one of|a list of [^,\n]*"
                          r"(?:, weight})?)(?:,? (.*))?\n", said)
        table[name] = (found[1], found[2] or "") if found else ("a string", "")
    return table


def edges(limits):
    """Numbers at and just beyond the ends of a range, (legal, illegal)."""
    found = re.search(r"(>?)(-?[\d.e+-]+?)\.\.(<?)([\d.e+-]+)", limits)
    if not found:
        return [], []
    low, high = float(found[2]), float(found[4])
    show = lambda x: str(int(x)) if x == int(x) and abs(x) < 1e18 else repr(x)
    legal = [show(low)] * (not found[1]) + [show(high)] * (not found[3])
    illegal = [show(low - 1), show(high + 1 if high < 1e15 else high * 2)]
    return legal, [x for x in illegal if x != "0" or not limits.startswith("0 or ")]


# A training that is legal, and would take milliseconds.
SMALL = ["train", "--run", "run", "--dry-run", "--run.device=cpu", "--data.synthetic=markov", "--model.d_model=32",
         "--model.layers=1", "--model.heads=4", "--moe.experts=4", "--moe.d_ffn=32", "--data.seq_len=16",
         "--train.steps=2", "--log.peak_tflops=1", "--precision.recipe=fp32"]


def cases_of_keys():
    for name, (kind, limits) in keys().items():
        legal, illegal = edges(limits)
        for value in [v for v in HOSTILE[kind] if v or '""' not in limits] + (illegal if "number" in kind or "integer" in kind else []):
            yield Case(SMALL + [f"--{name}={value}"], [name], {2})
        if kind in ("an integer", "a number"):
            # Legal by themselves, and then right, too much together, or too much memory.
            for value in legal + BIG_NUMBERS:
                yield Case(SMALL + [f"--{name}={value}"], [name] + ANY_KEY, {0, 2, 8})
        if kind in ("a string", "a list of paths", "a list of paths or {path, weight}"):
            for value in [LONG, "{" + "a." * 20000 + "a = 1}", "\x01", "[", "a b"]:
                yield Case(SMALL + [f"--{name}={value}"], [name, visible(value)[:10]] + ANY_KEY, {0, 2, 3, 4, 5})


def cases_of_files():
    for name in TEXTS:
        yield Case(["train", "--run", "run", "--config", name, "--dry-run"], [name], {2})
        yield Case(["plan", "--gtp", "--config", name], [name], {2})
    for name in NO_FILES:
        yield Case(SMALL + ["--config", name], [name], {0} if name == "empty" else {2})
        yield Case(SMALL + ["--data.synthetic=none", f"--data.train={name}"], [name], {3})
        yield Case(SMALL + [f"--data.valid={name}"], [name], {3})
        for key in "--run.resume", "--run.init_from":
            yield Case(SMALL + [f"{key}={name}"], [name], {4, 5})
        if name not in ("missing", "directory"):
            yield Case(["train", "--run", name] + SMALL[3:], [name], {4})
        yield Case(["eval", name, "--data=good.tok"], [name], {4, 5})
        yield Case(["generate", name, "--tokens=1"], [name], {4, 5})
        yield Case(["quantize", name, "--format=mxfp8", "--out=q"], [name], {3})
        yield Case(["dequantize", name, "--out=x.npy"], [name], {3})
        yield Case(["plot", name, "--out=x.svg"], [name], {3})
        yield Case(["convert", name, "--out=x"], [name], {4, 5})
        yield Case(["import", "--hf", name, "--out=x"], [name], {4, 5})
        yield Case(["export", name, "--hf=x"], [name], {4, 5})
        yield Case(["info", name], [name], {3})
        yield Case(["verify", name, "--json"], [name], {3})
        yield Case(["repair", name], [name], {3, 5})
        yield Case(["prepare", "text.txt", "--out", f"{name}/x"], [name],
                   {0} if name in ("missing", "directory") else {2, 4})
        if name != "/dev/zero":
            yield Case(["prepare", name, "--out=x", "--format=jsonl"], [name, "x.tok"], {3})
        if name != "directory":  # which is one
            yield Case(["doctor", "--dir", name], [name], {2})
        if name in ("directory", "fifo", "loop"):
            yield Case(["plot", "steps.jsonl", "--out", name], [name], {4})
            yield Case(["plan", "--gtp", "--out", name], [name], {4})
    for line in JSON_LINES:
        yield Case(["prepare", "-", "--format=jsonl", "--out=x"], ["standard input"], {3},
                   stdin=line.encode("latin-1"))


def cases_of_commands():
    yield Case(["prepare", "-", "--out=x"], ["x.tok"], {3})
    yield Case(["prepare", "text.txt", "--out=directory/"], ["directory/"], {2})
    yield Case(["prepare", "text.txt", "--out=good"], ["good.tok"], {2})
    yield Case(["prepare", "good.tok", "--format=text", "--out=good", "--force"], ["good.tok"], {2})
    yield Case(["plan"], ["--gtp"], {2})
    yield Case(["plan", "--gtp", "--from", "5", "--to", "3"], ["--from 5"], {2})
    yield Case(["plan", "--gtp", "--train.global_batch=1048576"], ["train.global_batch"], {2})
    for arguments in [], ["trian"], ["x" * 100000], ["\x1b[31m"], [""]:
        yield Case(arguments, ["command"], {2})
    # Every result goes to stdout, and to lose it is an error.
    full = open("/dev/full", "wb")
    for arguments in (["--help"], ["--version"], ["train", "--help"], ["train", "--print-config"], ["doctor"],
                      ["train", "--help=markdown"], ["eval", "--version"], ["doctor", "--json"], ["plan", "--gtp"],
                      ["info", "good.tok"], ["verify", "good.tok"], ["completion", "fish"], ["man"],
                      ["plot", "steps.jsonl", "--out", "-"], ["plan", "--gtp", "--out", "-"]):
        yield Case(arguments, ["stdout"], {4}, stdout=full)


# Arguments with which a command gets as far as its options; what is missing is then the next error.
BESIDE = {"train": [], "eval": ["missing", "--data=good.tok"], "generate": ["missing"], "plan": ["--gtp"],
          "prepare": ["missing", "--out=x"], "plot": ["missing", "--out=x.svg"], "doctor": ["--dir=missing"],
          "convert": ["missing", "--out=x"], "import": ["--hf=missing", "--out=x"],
          "export": ["missing", "--hf=x"], "info": ["missing"], "verify": ["missing"], "repair": ["missing"], "completion": ["tcsh"], "man": [],
          "quantize": ["missing", "--format=mxfp8", "--rounding=stochastic", "--out=q"],
          "dequantize": ["missing", "--out=x.npy"]}


def cases_of_options():
    for command, beside in BESIDE.items():
        said = ask(command, "--help").stdout.split("\n[")[0]
        for option, kind in re.findall(r"^  (?:-\w, *)?(--[\w.-]+)(?: (\w+))?", said, re.M):
            rest = [a for a in beside if not a.startswith(option + "=")]
            give = lambda value: [command, *rest, f"{option}={value}"]
            if kind in ("N", "NUMBER"):
                for value in NO_NUMBERS + (["1.5", "1.0"] if kind == "N" else []):
                    yield Case(give(value), [option], {2})
                for value in BIG_NUMBERS:
                    yield Case(give(value), [option, "missing"], {0, 2, 3, 4, 5})
            if kind == "WORD":
                for value in NO_WORDS:
                    yield Case(give(value), [option], {2})
            if kind in ("N", "NUMBER", "WORD"):
                yield Case([command, *rest, option, "1", option, "1"], [option], {2})
                yield Case([command, *rest, option], [option], {2})
        for value in "--nonsense", "--nonsense=1", "-z", "--\x1b[31m", "--" + "x" * 10000:
            yield Case([command, *beside, value], [visible(value)[:10]], {2})
        for key in "--foo.bar", "--foo.bar=1", "--.=1", "--a.b.c=1", "--" + "a." * 20000 + "a=1", "--model.=1":
            yield Case([command, *beside, key], [key[2:9]], {2})


def all_cases():
    yield from cases_of_files()
    yield from cases_of_commands()
    yield from cases_of_options()
    yield from cases_of_keys()


def furnish(directory):
    """Makes the files that the cases name, in an empty directory."""
    def path(name):
        return os.path.join(directory, name)
    os.mkdir(path("directory"))
    os.mkfifo(path("fifo"))
    os.symlink("loop", path("loop"))
    for name, data in (("empty", b""), ("garbage", bytes(range(256)) * 64), ("text.txt", b"some text " * 500),
                       ("steps.jsonl", b'{"v":1,"t":1,"step":1,"tokens":8,"loss":5.5}\n'),
                       *((name, text.encode(errors="surrogateescape")) for name, text in TEXTS.items())):
        with open(path(name), "wb") as f:
            f.write(data)
    made = ask("prepare", path("text.txt"), "--out", path("good"))
    if made.returncode:
        raise AssertionError(made.stderr)


def main():
    global PROGRAM
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--mpi", action="store_true")
    options = parser.parse_args()
    if options.mpi and not shutil.which("mpirun"):
        print("there is no mpirun")
        return 77
    PROGRAM = os.path.abspath(options.program)
    directory = tempfile.mkdtemp(prefix="moiety-bad-inputs-")
    done = failed = 0
    began = time.monotonic()
    try:
        furnish(directory)
        cases = (case for case in all_cases() if not options.mpi or can_be_of_mpirun(case))
        for number, case in enumerate(cases):
            if number % options.every:
                continue
            done += 1
            for fault in faults_of_ranks(case, directory) if options.mpi else faults(case, directory):
                failed += 1
                shown = " ".join(visible_argument(a) for a in case.arguments)
                print(f"case {number}: {shown}\n    {fault}")
    finally:
        shutil.rmtree(directory)
    print(f"{done} bad inputs, {failed} faults, {time.monotonic() - began:.0f} s")
    return 1 if failed or done == 0 else 0


if __name__ == "__main__":
    sys.exit(main())

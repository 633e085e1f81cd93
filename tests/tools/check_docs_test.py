#!/usr/bin/env python3
"""tools/check_docs.py finds every fault in a tree that has one of each kind, and nothing else."""

import unittest

from fault_tree import faults_in  # which finds tools/, so it comes first
import check_docs

PAGE = """# A page

[gone](gone.md) and [no heading](b.md#none), [fine](b.md#b-page)

{words}

`run.speed` and `run.dir`, `moiety fly`, `moiety train --wings`

`docs/b`, `docs/z`, `src.h`, `x_a.h`, `a.h`, `moiety train --ranks 2`

```
{words}
```
| {words} |
""".format(words=30 * "words ")

TREE = {
    "docs/a.md": PAGE,
    "docs/b.md": "# B page\n\n[a page](a.md), [keys](config.md)\n",
    "docs/config.md": "## [run]\n\n| `dir` | |\n| `old` | |\n",
    "docs/reliability.md": "| 0 | done |\n| 3 | data |\n",
    "src.h": "// docs/b.md#b-page, docs/b.md#c-page, docs/c.md\n",
    "apps/moiety/config/table.inc": 'KEY(run, dir, std::string, "")\nKEY(run, seed, int, 1)\n',
    "apps/moiety/program.cpp": 'kCommands[] = {\n    {"train", "", f},\n    {"eval", "", f},\n};\n'
    '"--ranks" "--quiet"\n',
    "apps/moiety/errors.h": "enum ExitCode : int {\n  kExitDone = 0,\n  kExitDevice = 9,\n};\n",
}
FAULTS = {
    "docs/a.md:3: docs/gone.md does not exist",
    "docs/a.md:3: docs/b.md has no heading #none",
    "docs/reliability.md: no page links to it",
    "src.h:1: docs/b.md has no heading #c-page",
    "src.h:1: docs/c.md does not exist",
    "docs/a.md:5: 180 columns of prose, at most 100",
    "docs/a.md:7: there is no key run.speed",
    "docs/a.md:7: there is no command moiety fly",
    "docs/a.md:7: no command has the option --wings",
    "docs/a.md:9: docs/z does not exist",
    "docs/a.md:9: no file is called a.h",
    "docs/config.md: run.old is in one of this page and the option table alone",
    "docs/config.md: run.seed is in one of this page and the option table alone",
    "docs: the command moiety eval is on no page",
    "docs: the option --quiet is on no page",
    "docs/reliability.md: exit code 3 is in one of this page and enum ExitCode alone",
    "docs/reliability.md: exit code 9 is in one of this page and enum ExitCode alone",
}


class CheckDocs(unittest.TestCase):
    def test_finds_every_fault_and_no_other(self):
        def check(root):
            return check_docs.Checker(root, sorted(TREE)).faults()

        self.assertEqual(faults_in(TREE, check), FAULTS)

    def test_wraps_prose_alone(self):
        words = "`a code span` [a link](b.md) 1. " + 10 * "word "
        item = "- " + 15 * "word " + words + "\n  more\n"
        table = "| " + 30 * "cell " + "|\n"
        wrapped = check_docs.wrapped(item + "\n" + table)
        self.assertEqual(wrapped.split(), (item + table).split())
        self.assertTrue(wrapped.endswith(table))
        lines = wrapped.split("\n\n")[0].split("\n")
        self.assertTrue(all(len(line) <= 100 for line in lines))
        self.assertTrue(all(line.startswith("  ") for line in lines[1:]))
        self.assertFalse(any(line.lstrip().startswith("1.") for line in lines))
        self.assertTrue(any("`a code span`" in line for line in lines))
        self.assertEqual(check_docs.wrapped(wrapped), wrapped)


if __name__ == "__main__":
    unittest.main()

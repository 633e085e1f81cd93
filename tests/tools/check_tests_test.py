#!/usr/bin/env python3
"""tools/check_tests.py finds every fault in a tree that has one of each kind, and nothing else."""

import unittest

from fault_tree import faults_in  # which finds tools/, so it comes first
import check_tests

ROWS = """
| `base/by_row.h` | `tests/base/many_test.cpp`, `tests/base/gone_test.cpp` | why |
| `base/unreached.h` | `tests/base/tested_test.cpp` | why |
| `base/tested.h` | `tests/base/tested_test.cpp` | why |
| `base/job.h` | `tests/base/many_test.cpp` | why |
| `base/silent.h` | `tests/base/many_test.cpp` | |
| `base/far.h` | `tests/base/many_test.cpp` | why |
| `base/far.h` | `tests/base/many_test.cpp` | why |
"""
TREE = {
    "moiety/base/CMakeLists.txt": "moiety_folder(base OPENMP a.cpp PRIVATE job.h\n  lost.h LINK z)\n",
    "moiety/base/tested.h": "",
    "moiety/base/unincluded.h": "",
    "moiety/base/untested.h": '#include "moiety/base/inside/x.h"\n',
    "moiety/base/by_row.h": '#include "moiety/base/job.h"\n#include "moiety/base/far.h"\n',
    "moiety/base/unreached.h": "",
    "moiety/base/silent.h": "",
    "moiety/base/far.h": "",
    "moiety/base/job.h": "",
    "moiety/base/inside/x.h": "",
    "tests/base/tested_test.cpp": '#include "tests/base/helper.h"\n',
    "tests/base/helper.h": '#include "moiety/base/tested.h"\n',
    "tests/base/unincluded_test.cpp": '#include "moiety/base/tested.h"\n',
    "tests/base/many_test.cpp": '#include "moiety/base/by_row.h"\n#include "moiety/base/silent.h"\n',
    "tests/README.md": ROWS,
}
FAULTS = {
    "moiety/base/CMakeLists.txt: there is no header lost.h",
    "moiety/base/by_row.h is public and includes moiety/base/job.h, which is private",
    "moiety/base/untested.h is public and includes moiety/base/inside/x.h, which is private",
    "moiety/base/untested.h has neither a test of its stem nor a row in tests/README.md",
    "tests/base/unincluded_test.cpp does not include moiety/base/unincluded.h",
    "tests/README.md: moiety/base/by_row.h: tests/base/gone_test.cpp does not exist",
    "tests/README.md: moiety/base/unreached.h: no test of its row reaches it",
    "tests/README.md: moiety/base/tested.h has a test of its stem",
    "tests/README.md: moiety/base/job.h is no public header",
    "tests/README.md: moiety/base/silent.h: it is not said why there",
    "tests/README.md: moiety/base/far.h has two rows",
}


class CheckTests(unittest.TestCase):
    def test_finds_every_fault_and_no_other(self):
        self.assertEqual(faults_in(TREE, check_tests.faults), FAULTS)


if __name__ == "__main__":
    unittest.main()

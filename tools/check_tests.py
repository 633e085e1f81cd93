#!/usr/bin/env python3
"""Holds tests against the public headers of the library.

Public is what stands directly in a folder of moiety/ and is not named PRIVATE in its
CMakeLists.txt: it is installed, compiled alone (target all_verify_interface_header_sets), includes
public headers only, and is tested: by tests/FOLDER/STEM_test.cpp (or FOLDER_gpu, FOLDER_mpi), or
by what a row of tests/README.md names, which says why there. A test of a header's stem includes it,
or a header of tests/ that does; one that a row names may reach it through library and program.
"""

import pathlib
import re
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
FOLDER_CALL = re.compile(r"moiety_folder\(\s*(\w+)([^)]*)\)")
KEYWORDS = {"EXCLUDE", "OPENMP", "LINK"}
# | `moe/prepare.h` | `tests/moe/ep_plan_test.cpp`, `tests/moe/ep_failure_test.cpp` | Plans in ... |
ROW = re.compile(r"^\| `(\S+\.h)` \| ((?:`\S+`(?:, )?)+) \| *(.*?) *\|$", re.M)


def public_headers(root):
    """Names "moiety/folder/x.h", and faults of the lists of private ones."""
    public, faults = set(), []
    for cmake in sorted(root.glob("moiety/*/CMakeLists.txt")):
        folder = cmake.parent
        call = FOLDER_CALL.search(cmake.read_text())
        private, inside = set(), False
        for word in call.group(2).split() if call else []:
            inside = (inside and word not in KEYWORDS) or word == "PRIVATE"
            if inside and word != "PRIVATE":
                private.add(word)
        headers = {path.name for path in folder.glob("*.h")}
        place = cmake.relative_to(root)
        faults += [f"{place}: there is no header {name}" for name in sorted(private - headers)]
        public |= {f"moiety/{folder.name}/{name}" for name in headers - private}
    return public, faults


class Includes:
    def __init__(self, root):
        self.root, self.direct = root, {}

    def of(self, name):
        if name not in self.direct:
            path = self.root / name
            self.direct[name] = INCLUDE.findall(path.read_text()) if path.is_file() else []
        return self.direct[name]

    def reaches(self, test, header, through):
        """Whether the test includes the header, itself or by headers in one of these folders."""
        seen, left = set(), [test]
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            found = self.of(name)
            if header in found:
                return True
            left += [other for other in found if other.startswith(through)]
        return False


def own_tests(root, header):
    _, folder, file = header.split("/")
    places = [f"tests/{folder}{kind}/{file[:-2]}_test.cpp" for kind in ("", "_gpu", "_mpi")]
    return [place for place in places if (root / place).is_file()]


def row_faults(root, includes, public, header, tests, why):
    """What is wrong with one row of tests/README.md."""
    if header not in public:
        yield f"{header} is no public header"
        return
    if own_tests(root, header):
        yield f"{header} has a test of its stem"
    if not why:
        yield f"{header}: it is not said why there"
    for test in tests:
        if not (root / test).is_file():
            yield f"{header}: {test} does not exist"
    if not any(includes.reaches(test, header, ("tests/", "moiety/", "apps/")) for test in tests):
        yield f"{header}: no test of its row reaches it"


def faults(root):
    public, found = public_headers(root)
    includes = Includes(root)
    for header in sorted(public):
        for target in includes.of(header):
            if target.startswith("moiety/") and target not in public:
                found.append(f"{header} is public and includes {target}, which is private")
    page = (root / "tests/README.md").read_text()
    rows = {}
    for name, tests, why in ROW.findall(page):
        header = f"moiety/{name}"
        named = re.findall(r"`(\S+)`", tests)
        if header in rows:
            found.append(f"tests/README.md: {header} has two rows")
        rows[header] = named
        found += [f"tests/README.md: {fault}"
                  for fault in row_faults(root, includes, public, header, named, why)]
    for header in sorted(public - set(rows)):
        tests = own_tests(root, header)
        if not tests:
            found.append(f"{header} has neither a test of its stem nor a row in tests/README.md")
        elif not any(includes.reaches(test, header, ("tests/",)) for test in tests):
            found.append(f"{tests[0]} does not include {header}")
    return found


def main():
    found = faults(pathlib.Path(__file__).resolve().parent.parent)
    print("\n".join(found) if found else "tests: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Errors of moiety.prepare, with the exit codes of the program (docs/reliability.md#exit-codes)."""


class UsageError(Exception):
    code = 2


class DataError(Exception):
    code = 3


class DiskError(Exception):
    code = 4

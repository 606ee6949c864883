"""How the C library treats freed memory."""

from __future__ import annotations

import ctypes
import os
import platform

#: Parameters of glibc's mallopt, by their numbers in malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Let the process keep freed memory for what it allocates next; whether that was possible.

    glibc hands a large block back to the system as soon as it is freed, and the next one costs a page
    fault every 4 KiB: a layer of PyG that makes a message for every edge spends most of its time on that.
    For processes that do the same over and over, such as training; memory that others wait for would not
    come back. Settings of the user's own (``MALLOC_*_``, ``GLIBC_TUNABLES``) stay as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 << 20))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)

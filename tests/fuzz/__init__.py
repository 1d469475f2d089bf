"""Damaged files by the thousand. One thread, from the first import on: others do not survive a fork."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

"""The kernel under test, loaded as users load it; conftest.py has pointed LOCAL_KERNELS at it."""

from kernels import get_kernel

optimizer = get_kernel("org/optimizer", version=1)

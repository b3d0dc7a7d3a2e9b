"""Settings for tests in one process: strategies are compared over as many CPU devices as meshes of two axes need."""

import os

import jax

if "JAX_NUM_CPU_DEVICES" not in os.environ:
    jax.config.update("jax_num_cpu_devices", 8)

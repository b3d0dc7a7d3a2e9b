"""Fourier transforms of arrays that are cut over ranks and devices, with the names and arguments of jax.numpy.fft."""

from pycollective.fft.blocks import cut, join
from pycollective.fft.frequencies import fftfreq, rfftfreq
from pycollective.fft.transforms import (
    fft,
    fft2,
    fftn,
    ifft,
    ifft2,
    ifftn,
    irfft,
    irfft2,
    irfftn,
    rfft,
    rfft2,
    rfftn,
)

__all__ = [
    "cut",
    "fft",
    "fft2",
    "fftfreq",
    "fftn",
    "ifft",
    "ifft2",
    "ifftn",
    "irfft",
    "irfft2",
    "irfftn",
    "join",
    "rfft",
    "rfft2",
    "rfftfreq",
    "rfftn",
]

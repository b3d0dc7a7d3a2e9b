"""Iterative solvers, eigenpairs and QR of arrays that are cut over ranks or devices."""

from pycollective.linalg.biconjugate_gradients import bicgstab
from pycollective.linalg.conjugate_gradients import cg
from pycollective.linalg.eigenpairs import lobpcg
from pycollective.linalg.implicit import Info
from pycollective.linalg.minimal_residual import gmres
from pycollective.linalg.tall_qr import tsqr
from pycollective.linalg.vectors import norm, vdot

__all__ = ["Info", "bicgstab", "cg", "gmres", "lobpcg", "norm", "tsqr", "vdot"]

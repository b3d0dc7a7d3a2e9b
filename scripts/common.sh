# For the scripts that run something in the environment of one MPI library; they source it.

# venv_of MPI: its environment, relative to the repository.
venv_of() { [ "$1" = mpich ] && echo .venv || echo ".venv-$1"; }

# Open MPI refuses root, whom containers run as, unless told so.
allow_root() { [ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; }

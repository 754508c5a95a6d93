"""Expert parallelism: token dispatch to experts on other ranks."""

"""Where jobs run: in this process, on the GPUs of this machine, on a Ray cluster, or in processes started together."""

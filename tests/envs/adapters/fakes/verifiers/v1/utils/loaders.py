def default_harness_id(taskset_id: str) -> str:
    return "bash"

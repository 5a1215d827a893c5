"""How many replicas Ray Serve is to keep. Its controller gets this function by value, so nothing is imported here."""


def needed(load) -> tuple[float, dict]:
    """(replicas for the answers that are open, nothing to remember). load: Ray Serve's AutoscalingContext, whose
    figures are means of its look-back period. What counts are the answers that replicas have, and the calls that wait
    at fronts for a replica. The streams of fronts are calls, too, and do not count: an idle front is no load."""
    if not load.running_replicas:
        return load.target_num_replicas, {}
    answers = sum(load.aggregated_metrics.get("answers", {}).values()) + load.total_queued_requests
    return answers / load.config.get_target_ongoing_requests(), {}

"""Ray Serve's question where a call goes, answered by a front's Table.

Ray Serve makes a router in every process that calls a deployment. In a front it finds the front's Link by the name of
the deployment's application (links.py); elsewhere, where there is none, any replica will do. Ray Serve sends the class
to these processes by value, with the globals that it names: so those are modules here.
"""

import random

from ray.serve.request_router import RequestRouter

from . import links


class PrefixRouter(RequestRouter):
    """Sends an answer where its Link wants it, and a front's other calls to the replica that they name."""

    def initialize_state(self, application: str):
        self.application = application

    def update_replicas(self, replicas):
        super().update_replicas(replicas)
        if link := links.LINKS.get(self.application):
            link.see([one.replica_id.unique_id for one in replicas])

    def on_replica_actor_died(self, replica_id):
        super().on_replica_actor_died(replica_id)
        self.update_replicas(list(self.curr_replicas.values()))

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        if pending_request is not None:         # or Ray Serve would ask again at once, for ever, if there is none
            pending_request.routing_context.should_backoff = True
        known = {one.replica_id.unique_id: one for one in candidate_replicas}
        link, call = links.LINKS.get(self.application), pending_request and pending_request.metadata.call_method
        if link is not None and not link.table.replicas:        # a Link that is newer than this router
            link.see(list(known))
        if link is None or call not in ("answer", "listen"):
            return [random.sample(candidate_replicas, min(len(known), 2))]
        first, _, *_ = pending_request.args
        if call == "listen":
            return [[known[first]]] if first in known else []
        return [[known[id]] for id in link.place(first, list(known))]

    def on_request_routed(self, pending_request, replica_id, result):
        link = links.LINKS.get(self.application)
        if link is not None and pending_request.metadata.call_method == "answer":
            link.placed(pending_request.args[0], replica_id.unique_id)

"""torchrun for one node, with a store that only this node can reach: torchrun's own listens on every interface.

python launcher/agent.py --nproc-per-node 8 -- launcher/main.py [flags]

It is torchrun in all else, with its rendezvous replaced: one node has nobody to meet.
"""

from __future__ import annotations

import gc
import socket
import sys

gc.disable()  # nearly all of an agent's time goes into imports, which make objects that stay

from torch.distributed import PrefixStore, TCPStore  # noqa: E402
from torch.distributed.elastic.rendezvous import (  # noqa: E402
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous  # noqa: E402
from torch.distributed.run import main  # noqa: E402

BACKEND, LOOPBACK = "loopback", "127.0.0.1"


class LoopbackRendezvous(StaticTCPRendezvous):
    """A rendezvous of one node, whose store listens on the loopback address at a port of the system's choice."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
                listener.bind((LOOPBACK, 0))
                self.master_port = listener.getsockname()[1]
                self._store = TCPStore(
                    LOOPBACK,
                    self.master_port,
                    is_master=True,
                    timeout=self.timeout,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),  # the store closes it
                )
        store = PrefixStore(self.run_id, self._store)
        return RendezvousInfo(store, self.rank, self.world_size, RendezvousStoreInfo(LOOPBACK, self.master_port))


def make_rendezvous(params: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(LOOPBACK, 0, 0, 1, params.run_id, timeout=60)


if __name__ == "__main__":
    rendezvous_handler_registry.register(BACKEND, make_rendezvous)
    main([f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={LOOPBACK}:0", *sys.argv[1:]])

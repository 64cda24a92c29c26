"""The host's side of the wall: sessions, the pool of workers, and the ``local`` back end."""

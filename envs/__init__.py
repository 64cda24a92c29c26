"""The environments that come with agentrl; each is reached by its id, such as ``agentrl/Arithmetic-v0``."""

from verifiers.v1 import MessageNode as MessageNode

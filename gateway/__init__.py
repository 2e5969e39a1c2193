"""The stateless front end: validates and tokenizes requests, submits them over its link to a shard's leader,
and streams text back."""

import os

# Children that judge formats are forked while gRPC's threads run. With gRPC's handlers of forks about one
# child in a hundred dies before it begins, and its format would be refused. gRPC reads this when it is
# imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

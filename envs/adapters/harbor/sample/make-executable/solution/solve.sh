#!/bin/bash
printf '#!/bin/sh\necho hello\n' >/app/hello.sh && chmod +x /app/hello.sh

#!/bin/bash
python3 - <<'END'
import collections, json
merged = collections.Counter()
for name in 'ab':
    merged.update(json.load(open(f'/app/{name}.json')))
json.dump(merged, open('/app/merged.json', 'w'))
END

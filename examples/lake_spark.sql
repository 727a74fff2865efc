-- The lake in Spark SQL, with Delta's extension; {folder} is LAKE/APPLICATION and {store} the store.
-- The busiest days of what is closed:
SELECT day, count(*) AS windows, count(DISTINCT key) AS keys
FROM delta.`{folder}/closed/{store}` GROUP BY day ORDER BY windows DESC;
-- The windows that are open the longest:
SELECT CAST(key AS STRING) AS key, end_ms - start_ms AS ms
FROM delta.`{folder}/state` WHERE row = 'window' AND store = '{store}' ORDER BY ms DESC, key LIMIT 3;

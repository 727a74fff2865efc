-- The lake in Spark SQL, with Delta's extension, as docs/lake.md runs it: the variable folder is LAKE/APPLICATION.
-- The busiest days of what is closed. Of a window that was corrected the highest revision counts, and without a state
-- it is no more.
SELECT day, count(*) AS windows, count(DISTINCT key) AS keys
FROM (SELECT *, row_number() OVER (PARTITION BY partition, key, start_ms, end_ms ORDER BY revision DESC) AS place
      FROM delta.`${folder}/closed/${store}`)
WHERE place = 1 AND state IS NOT NULL GROUP BY day ORDER BY windows DESC;
-- The windows that are open the longest:
SELECT CAST(key AS STRING) AS key, end_ms - start_ms AS ms
FROM delta.`${folder}/state` WHERE row = 'window' AND store = '${store}' ORDER BY ms DESC, key LIMIT 3;
